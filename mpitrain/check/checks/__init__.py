"""All checks, by subject. One module is one subject: the questions for the nodes, and the checks.

A module has CHECKS and, where it needs them, ASKS (questions for the nodes), PAIRS and CLUSTER (the steps that make the
sections of these names). A new check is one entry in the `CHECKS` of its module. A new subject is a module and a line
here. In `SUBJECTS`, every check comes after the checks that it needs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mpitrain.check.check import Ask, Check
from mpitrain.check.checks import (
    baseline,
    clock,
    container,
    environment,
    exports,
    gpu,
    limits,
    login,
    mpi,
    names,
    network,
    performance,
    reach,
    share,
    ssh,
    sshd,
    start,
    tunnel,
    users,
)
from mpitrain.check.collect import ClusterStep, PairStep

SUBJECTS: tuple[ModuleType, ...] = (
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
    gpu,
    exports,
    share,
    environment,
    start,
    mpi,
    performance,
    baseline,
)


def _of(subject: ModuleType, name: str) -> Any:
    """The value of an optional name of a subject's module; empty if it does not have the name."""
    return vars(subject).get(name, {})


CHECKS: dict[str, Check] = {check.id: check for subject in SUBJECTS for check in subject.CHECKS}
ASKS: dict[str, Ask] = {ask.section: ask for subject in SUBJECTS for ask in _of(subject, "ASKS")}
PAIRS: dict[str, PairStep] = {name: step for subject in SUBJECTS for name, step in _of(subject, "PAIRS").items()}
CLUSTER: dict[str, ClusterStep] = {name: step for subject in SUBJECTS for name, step in _of(subject, "CLUSTER").items()}
