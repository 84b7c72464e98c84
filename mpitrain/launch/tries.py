"""The tries of a job over several hosts. The guards of the next try log in while the present one trains.

A restart would otherwise spend most of its time on logins, those of mpiexec too, and on facts. The facts are asked when
the present try has made its first step. At the restart only the folders are looked at again, because a share may be
lost. If the code has changed meanwhile, the ranks may fail before their first step; the try after that has nothing
prepared, and asks anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launch.dialects import JobSpec
from mpitrain.launch.ending import Ended
from mpitrain.launch.keepers import KEEPER_SILENCE_SECONDS, Keepers
from mpitrain.launch.live import Live
from mpitrain.launch.live_try import LiveTry
from mpitrain.launch.over_hosts import JobOverHosts
from mpitrain.launch.processes import left_out
from mpitrain.launch.reserve import Reserve

# Facts that are being asked for when they are needed without some hosts: it may be one of these that does not answer.
_FACTS_SECONDS = 2.0
# To ask the same hosts anew would take longer. But nobody sends beats to the keepers meanwhile.
_FACTS_SECONDS_OF_ALL = KEEPER_SILENCE_SECONDS / 2


class Tries:
    """Use this in `with`, in the main thread: at its end, no guard is left."""

    def __init__(
        self,
        make: Callable[[ExitStack, JobSpec], JobOverHosts],
        keepers: Keepers | None,
        reserve: Reserve | None,
        live: Live,
    ) -> None:
        """Nothing is started yet.

        Args:
            make: returns a job before its start; what it opens is closed with the stack.
            keepers: of the job; None: it is not started again.
            reserve: the spares that become the ranks, if there are any.
            live: lets others watch the job.
        """
        self._make, self._keepers, self._reserve, self._live = make, keepers, reserve, live
        self._stack = ExitStack()
        self._next: JobOverHosts | None = None
        self._thread: threading.Thread | None = None
        self._has_begun = self._has_facts = self._has_ways = False

    def __enter__(self) -> Tries:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def run(self, job: JobSpec, meanwhile: Callable[[], None]) -> Ended:
        """Start a try and see to its end; `meanwhile` is called some times a second.

        Raises:
            LaunchError: hosts cannot be reached, or differ from this one.
        """
        with ExitStack() as stack:
            prepared = self._take(stack, job)
            new = prepared or self._make(stack, job)
            if prepared is None:
                new.connect(self._keepers)
                new.ask()
            # One login to a host at a time: see JobOverHosts.open_ways. The holders come before those of mpiexec.
            if self._keepers is not None:
                self._keepers.begin(job.placement.hosts, new.job.context.job)
                if prepared is not None:
                    new.guards.beat_for(self._keepers)
                self._keepers.settle()
            if self._reserve is not None:
                self._reserve.begin(job.placement.hosts)
            stack.enter_context(self._live.showing(new.job.context.job, LiveTry(new.job, new.guards)))
            return new.ready().to_end(self._looking(new, meanwhile))

    def after(self, stack: ExitStack, job: JobOverHosts, meanwhile: Callable[[], None]) -> Callable[[], None]:
        """A try that was started elsewhere has taken over; `stack` is closed at its end.

        Return what is to be called some times a second with it.
        """
        self.forget()
        stack.enter_context(self._live.showing(job.job.context.job, LiveTry(job.job, job.guards)))
        return self._looking(job, meanwhile)

    def _looking(self, job: JobOverHosts, meanwhile: Callable[[], None]) -> Callable[[], None]:
        def look() -> None:
            self._look(job)
            meanwhile()

        return look

    def forget(self) -> None:
        """Drop what is prepared."""
        self._stack.close()
        if self._thread is not None:
            self._thread.join()  # without its connections it ends soon
        self._next = self._thread = None
        self._has_begun = False

    def _look(self, present: JobOverHosts) -> None:
        """Prepare the next try when the present one has made a step."""
        if self._has_begun or self._keepers is None:
            self._open_ways()
            return
        if not any(record.step > record.first_step for record in present.guards.records().values()):
            return
        try:
            self._next = self._make(self._stack, present.job)
            self._next.connect(None, is_idle=True)
        except (ConfigError, LaunchError, OSError):  # the next try will say so
            self.forget()
        else:
            self._has_facts = self._has_ways = False
            self._stack.enter_context(left_out(self._next.guards.processes()))
            self._thread = threading.Thread(target=self._ask, args=(self._next,), name="next try", daemon=True)
            self._thread.start()
        self._has_begun = True

    def _open_ways(self) -> None:
        """When the guards of the next try have logged in, log in for its mpiexec."""
        if self._next is None or self._has_ways or not self._has_facts:
            return
        self._has_ways = True
        with suppress(OSError):  # mpiexec logs in as always
            self._next.open_ways()

    def _ask(self, job: JobOverHosts) -> None:
        try:
            job.ask()
            job.guards.keep()
        except Exception:  # whatever it is: the next try asks anew, and reports it
            return
        self._has_facts = True

    def _take(self, stack: ExitStack, job: JobSpec) -> JobOverHosts | None:
        """Return `job` with guards and facts, if they are prepared and fit; they are closed with `stack`."""
        taken = self._next
        if taken is not None and self._thread is not None:
            is_whole = job.placement.hosts == taken.job.placement.hosts
            self._thread.join(_FACTS_SECONDS_OF_ALL if is_whole else _FACTS_SECONDS)
            if not self._thread.is_alive() and self._has_facts and taken.becomes(job):
                stack.enter_context(self._stack.pop_all())
                self._next = self._thread = None
        if self._next is not None:
            taken = None
        self.forget()
        return taken
