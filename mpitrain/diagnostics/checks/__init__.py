"""All checks, by subject. One module is one subject: what it asks of the nodes, and its checks.

A new check is one entry in the `CHECKS` of its module; a new subject is a module and a line here. `SUBJECTS` is in an
order in which every check comes after those that it needs.
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
    start,
