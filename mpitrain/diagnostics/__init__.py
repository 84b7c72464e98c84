"""What can be wrong with this machine. One module here is one subject: it collects facts and judges them.

`collect` looks at the machine and never raises for what it finds; `judge` is a pure function, so that every
judgement has a test with made-up facts. A new subject is one module and one line in `SUBJECTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol, cast

from mpitrain.diagnostics import gpu, limits, mpi, network, python
from mpitrain.diagnostics.finding import Finding


class Facts(Protocol):
    """What a subject found: a dataclass of plain values."""

    def lines(self) -> list[tuple[str, str]]:
        """The facts for people, as (name, value)."""


class Subject(Protocol):
    """What a subject's module has."""

    def collect(self) -> Facts:
        """Look at this machine."""

    def judge(self, facts: Any) -> Sequence[Finding]:
        """What is wrong with what `collect` saw."""


def _subject(module: ModuleType) -> Subject:
    return cast(Subject, module)


SUBJECTS: dict[str, Subject] = {
    "mpi": _subject(mpi),
    "python": _subject(python),
    "gpu": _subject(gpu),
    "network": _subject(network),
    "limits": _subject(limits),
}
