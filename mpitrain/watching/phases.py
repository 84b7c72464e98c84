"""The phase that each rank of a job has reached, and when that was seen. The exit code of mpiexec does not tell.

If a rank leaves by os._exit(0), MPICH's mpiexec returns 0, and silently ends the ranks that wait for this rank.
"""

from __future__ import annotations

from collections.abc import Set

from mpitrain.watching.rank_record import BEGUN, DONE, FAILED, PARTED, PHASES, RankRecord


class Phases:
    """The phases that ranks have reached.

    Attributes:
        when: by phase, then by rank, the time at which this was first seen. A rank that has reached a phase has also
            reached the phases before it. A failure is an exception: it implies no earlier phase.
    """

    def __init__(self) -> None:
        self.when: dict[str, dict[int, float]] = {phase: {} for phase in PHASES}

    def add(self, record: RankRecord, now: float) -> None:
        """Take in the record of a rank."""
        passed = [FAILED] if record.phase == FAILED else PHASES[: PHASES.index(record.phase) + 1]
        for phase in passed:
            self.when[phase].setdefault(record.rank, now)

    def missing(self, lost: Set[int]) -> list[int]:
        """Return the ranks that have begun and have not finished, in increasing order, but for the `lost` ones.

        If all have finished, return those that have ended while they waited for the others.
        """
        done = self.when[DONE].keys()
        return sorted(self.when[BEGUN].keys() - done - lost or done - self.when[PARTED].keys() - lost)
