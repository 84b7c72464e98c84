"""All checks, by subject. One module is one subject: the questions for the nodes, and the checks.

A new check is one entry in the `CHECKS` of its module. A new subject is a module and a line here. In `SUBJECTS`, every
check comes after the checks that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol, cast

from mpitrain.diagnostics.check import Ask, Check
from mpitrain.diagnostics.checks import (
    clock,
    container,
    drift,
    environment,
    exports,
    gpu,
    inventory,
    launcher,
    leftovers,
    limits,
    login,
    mpi,
    mpi_rate,
    names,
    network,
    performance,
    reach,
    share,
    shell,
    ssh,
    sshd,
    start,
    tunnel,
    two_ranks,
    users,
)
from mpitrain.diagnostics.collect import ClusterStep, PairStep


class Subject(Protocol):
    """The interface of a subject's module. `PAIRS` and `CLUSTER` are the steps that make the sections of these
    names."""

    ASKS: Sequence[Ask]
    PAIRS: Mapping[str, PairStep]
    CLUSTER: Mapping[str, ClusterStep]
    CHECKS: Sequence[Check]


def _subjects(*modules: ModuleType) -> tuple[Subject, ...]:
    return tuple(cast(Subject, module) for module in modules)


SUBJECTS = _subjects(
    inventory,
    login,
    tunnel,
    container,
    names,
    users,
    network,
    reach,
    sshd,
    ssh,
    clock,
    limits,
    leftovers,
    gpu,
    exports,
    share,
    shell,
    environment,
    start,
    launcher,
    two_ranks,
    mpi,
    performance,
    mpi_rate,
    drift,
)
CHECKS: dict[str, Check] = {check.id: check for subject in SUBJECTS for check in subject.CHECKS}
ASKS: dict[str, Ask] = {ask.section: ask for subject in SUBJECTS for ask in subject.ASKS}
PAIRS: dict[str, PairStep] = {name: step for subject in SUBJECTS for name, step in subject.PAIRS.items()}
CLUSTER: dict[str, ClusterStep] = {name: step for subject in SUBJECTS for name, step in subject.CLUSTER.items()}
