"""How far the ranks of a job have come, and when that was seen. The exit code of mpiexec does not tell.

If a rank leaves by os._exit(0), MPICH's mpiexec returns 0, and ends the ranks that wait for it without a word.
"""

from __future__ import annotations

from mpitrain.watching.rank_record import BEGUN, DONE, FAILED, PHASES, RankRecord


class Phases:
    """Who has come how far.

    Attributes:
        when: by phase, then by rank, when that was first seen. A rank that has come to one has come to those before it;
            one that failed has come to none of them for that.
    """

    def __init__(self) -> None:
        self.when: dict[str, dict[int, float]] = {phase: {} for phase in PHASES}

    def add(self, record: RankRecord, now: float) -> None:
        """Take in the record of a rank."""
        passed = [FAILED] if record.phase == FAILED else PHASES[: PHASES.index(record.phase) + 1]
        for phase in passed:
            self.when[phase].setdefault(record.rank, now)

    def missing(self) -> list[int]:
        """The ranks that have begun and have not come to their end, in increasing order."""
        return sorted(self.when[BEGUN].keys() - self.when[DONE].keys())
