"""The time that the remaining steps of a run take."""

from __future__ import annotations

_LEAST_SECONDS = 30.0  # over which the mean is taken, once a run has lasted that long


class TimeLeft:
    """Uses the mean time of a step, with the hooks after it, over the last half of the run or more.

    Times are of time.perf_counter().
    """

    def __init__(self, step: int, now: float) -> None:
        """A run begins after this step, or continues there in another World."""
        self._begun = self._since = self._next = self._first = (now, step)
        self._num_made = 0

    def add(self, step: int, now: float) -> None:
        """Note a completed step. The first one also compiles and reads, so it counts only until there is another."""
        self._num_made += 1
        if self._num_made == 1:
            self._first = now, step
        elif self._num_made == 2:
            self._since = self._next = self._first
        elif now - self._next[0] >= max(_LEAST_SECONDS, self._next[0] - self._begun[0]):
            self._since, self._next = self._next, (now, step)

    def leave_out(self, seconds: float) -> None:
        """Do not count a pause of this length, which has just ended."""
        marks = (self._begun, self._since, self._next, self._first)
        self._begun, self._since, self._next, self._first = ((at + seconds, step) for at, step in marks)

    def seconds(self, step: int, last: int | None, now: float) -> float | None:
        """Return the time from `step`, which was just made, to the end of step `last`; None: it is not known."""
        at, begin = self._since
        if last is None or step <= begin:
            return None
        return max(0, last - step) * (now - at) / (step - begin)
