"""The next attempt of a job, started while the present one trains. Training pauses while the state changes hands.

    hosts ─> facts ─> room ─> mpiexec ─> init(), build ─> ready ─> the ranks before leave ─> continue from their copy

Its ranks wait for those before them at their keepers (kept.py), so the launcher need not be quick. Until then its
output is held back.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launch.ending import Ended, why
from mpitrain.launch.holders import Holders
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.over_hosts import JobOverHosts
from mpitrain.launch.placement import Placement
from mpitrain.launch.prepared_job import PreparedJob
from mpitrain.launch.run import Run

_GIB = 1 << 30


class Successor:
    """Call `look` some times a second, and `to_end` when the present try has left, or `close`. All in the main thread.

    Attributes:
        problem: why it cannot take over; "": nothing is known that is against it.
        faulty: the hosts because of which it cannot, as far as is known.
        has_room: its ranks have room beside those of the present try, as far as is known.
    """

    def __init__(
        self,
        make: Callable[[ExitStack], JobOverHosts],
        keepers: Keepers,
        holders: Holders | None,
        after: Callable[[ExitStack, JobOverHosts, Callable[[], None]], Callable[[], None]],
    ) -> None:
        """Begin to ask the hosts.

        Args:
            make: returns what is to be started; its context names the try that it follows.
            keepers: of the job.
            holders: of the warm interpreters that fork its ranks, if there are any.
            after: see Attempts.after.
        """
        self.problem = ""
        self.faulty: tuple[str, ...] = ()
        self.has_room = True
        self._keepers, self._holders, self._after = keepers, holders, after
        self._has_keepers = False  # they have been told to come
        self._run: Run | None = None
        self._prepared = PreparedJob(make)

    def look(self) -> None:
        """Continue with what is to be done before its ranks are ready."""
        if self.problem or not self._prepared.is_done():
            return
        if self._prepared.error is not None:
            self._fail(self._prepared.error)
        elif self._run is None:
            try:
                self._go_on()
            except (ConfigError, LaunchError, OSError) as error:
                self._fail(error)
        elif not self._run.beside():
            ended = self._run.to_end()
            cause, rank = why(ended, self._where.host_of)
            self.faulty = ended.lost or (() if rank is None else (self._where.host_of(rank),))
            self.problem = cause if ended.code else "the script ended, and had trained nothing"
            if ended.is_interrupted:  # the signal was for the whole job
                signal.raise_signal(ended.code - 128)

    def _go_on(self) -> None:
        """Have keepers come, then ranks: one login to a host at a time (Attempts.run)."""
        if not self._has_keepers:
            self._has_keepers = True
            self._keepers.widen(self._where.hosts)
            self._prepared.begin(self._settle)
        else:
            self._run = self._prepared.job.ready()
            self._run.start()

    @property
    def is_ready(self) -> bool:
        """True if all its ranks wait for those before them."""
        if self.problem or self._run is None:
            return False
        records = self._prepared.job.attempt.records()
        return len(records) == self._where.num_ranks and all(record.is_ready for record in records.values())

    def to_end(self, meanwhile: Callable[[], None]) -> Ended:
        """The ranks before have left. See Run.to_end."""
        assert self._run is not None
        job, stack = self._prepared.job, self._prepared.stack
        try:
            self._keepers.take_over(self._where.hosts, job.job.context.job)
            if self._holders is not None:
                self._holders.begin()
            job.attempt.beat_for(self._keepers)
            return self._run.to_end(self._after(stack, job, meanwhile))
        finally:
            self._run = None
            stack.close()

    def close(self) -> None:
        """End it. Nothing of it is left."""
        if self._run is not None and not self.problem:
            self._run.give_up()
        self._prepared.close()

    @property
    def _where(self) -> Placement:
        return self._prepared.job.job.placement

    def _settle(self) -> None:
        self._keepers.settle()
        self.problem = self._why_not()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, LaunchError):
            self.faulty = (*error.hosts, *error.different)
        self.problem = str(error) or repr(error)

    def _why_not(self) -> str:
        """Say why the keepers do not let the ranks begin."""
        rooms = self._keepers.rooms()
        if lacking := [host for host in self._where.hosts if host not in rooms]:
            self.has_room = False
            return f"no keeper answers on {', '.join(lacking)}"
        for place in self._where.places:
            room = rooms[place.host]
            needed = place.num_ranks * room.held_bytes / max(1, room.num_ranks)
            self.has_room = not room.has_gpu and needed <= room.free_bytes
            if room.has_gpu:
                return f"its ranks use a GPU on {place.host}, whose memory may not hold two of them"
            if not self.has_room:
                return (
                    f"{place.host} has {room.free_bytes / _GIB:.1f} GiB of free memory, and its new ranks need about "
                    f"{needed / _GIB:.1f} GiB"
                )
        return ""
