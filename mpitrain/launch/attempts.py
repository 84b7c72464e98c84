"""The attempts of a job, here or over several hosts, one after the other, and how each lets itself be watched.

Over hosts, the next attempt is prepared while the present one trains. A restart would otherwise spend most of its time
on facts, and on the logins of mpiexec. The facts are asked when the present attempt has made its first step. At the
restart only the folders are looked at again, because a share may be lost. If the code has changed meanwhile, the ranks
may fail before their first step; the attempt after that has nothing prepared, and asks anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

from mpitrain.launch.dialects import JobSpec
from mpitrain.launch.ending import Ended
from mpitrain.launch.holders import Holders
from mpitrain.launch.job_here import JobHere
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.live import Live
from mpitrain.launch.live_picture import add_printed, of_ranks
from mpitrain.launch.log import KEPT
from mpitrain.launch.over_hosts import JobOverHosts
from mpitrain.launch.prepared_job import PreparedJob
from mpitrain.launch.roster import served
from mpitrain.launch.trouble import SILENCE_SECONDS
from mpitrain.launch.watch import AttemptOnHosts
from mpitrain.watching.hang_report import SEEN_ONLY

# A load is reported every second; an older one is of a time without watchers, or of a silent host.
_OLD_SECONDS = 5.0
_LINES = 50  # of what a rank has printed, in which its step is looked for


class LiveAttempt:
    """See live.Watchable."""

    def __init__(self, job: JobSpec, attempt: AttemptOnHosts) -> None:
        self._placement, self._attempt = job.placement, attempt
        self._has_servers = bool(job.context.servers)
        self._seen: dict[int, tuple[str, float]] = {}  # by rank: its phase, and since when this was seen

    def watch(self, seconds: float) -> None:
        """See live.Watchable."""
        self._attempt.watch(seconds)

    def looked(self) -> float:
        """See live.Watchable."""
        hosts = self._attempt.hosts_now()
        return min(
            (report.ranks_at for host, (report, silent) in hosts.items() if silent < SILENCE_SECONDS),
            default=time.monotonic(),
        )

    def picture(self) -> dict[str, Any]:
        """See live.Watchable."""
        hosts = self._attempt.hosts_now()
        views = [view for report, _ in hosts.values() for view in report.ranks.values()]
        places = {place.host: place.ranks for place in self._placement.places}
        silence = {host: silent for host, (_, silent) in hosts.items()}
        now = time.monotonic()
        loads = {
            host: report.load
            for host, (report, _) in hosts.items()
            if report.load is not None and now - report.load_at < _OLD_SECONDS
        }
        picture = of_ranks(views, places, silence, loads)
        add_printed(picture, lambda rank: KEPT.newest(rank, _LINES))
        self._set_since(picture["ranks"])
        first = next((entry for entry in picture["ranks"] if entry["rank"] == 0), None)
        if self._has_servers and first is not None and first["host"] == self._placement.own and first["pid"]:
            picture["served"] = served(first["pid"]) or None
        return picture

    def _set_since(self, ranks: Iterable[dict[str, Any]]) -> None:
        """A rank says since when it works or waits, but not since when it is stopped, or its host is silent."""
        now = time.monotonic()
        for entry in ranks:
            phase, since = self._seen.get(entry["rank"], ("", now))
            if phase != entry["phase"]:
                phase, since = self._seen[entry["rank"]] = entry["phase"], now
            if phase in SEEN_ONLY:
                entry["since"] = round(now - since, 1)


# Facts that are being asked for when they are needed without some hosts: it may be one of these that does not answer.
_FACTS_SECONDS = 2.0
# To ask the same hosts anew would take longer.
_FACTS_SECONDS_OF_ALL = 30.0


class Attempts:
    """Use this in `with`, in the main thread: at its end, no agent is left."""

    def __init__(
        self,
        make_here: Callable[[ExitStack, JobSpec], JobHere],
        make_over_hosts: Callable[[ExitStack, JobSpec], JobOverHosts],
        keepers: Keepers | None,
        holders: Holders | None,
        live: Live,
    ) -> None:
        """Nothing is started yet.

        Args:
            make_here: returns a job on this machine alone before its start; what it opens is closed with the stack.
            make_over_hosts: the same, over several hosts.
            keepers: of the job; None: it is not started again.
            holders: of the warm interpreters that fork the ranks of later attempts; None: the job is not started again.
            live: lets others watch the job.
        """
        self._make_here, self._make_over_hosts = make_here, make_over_hosts
        self._keepers, self._holders, self._live = keepers, holders, live
        self._next: PreparedJob | None = None
        self._has_begun = self._has_ways = False

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def run(self, job: JobSpec, meanwhile: Callable[[], None]) -> Ended:
        """Start an attempt and wait for its end; `meanwhile` is called several times a second.

        Raises:
            LaunchError: hosts cannot be reached, or differ from this one.
        """
        with ExitStack() as stack:
            prepared = self._take(stack, job)
            make = self._make_here if job.placement.is_here else self._make_over_hosts
            new = prepared or make(stack, job)
            if prepared is None:
                new.connect(self._keepers)
                new.ask()
            # One login to a host at a time: see JobOverHosts.open_ways.
            if self._keepers is not None:
                self._keepers.begin(job.placement.hosts, new.job.context.job)
                if prepared is not None:
                    new.attempt.beat_for(self._keepers)
                self._keepers.settle()
            if self._holders is not None:
                self._holders.begin()
            stack.enter_context(self._live.showing(new.job.context.job, LiveAttempt(new.job, new.attempt)))
            return new.ready().to_end(self._looking(new, meanwhile))

    def after(self, stack: ExitStack, job: JobOverHosts, meanwhile: Callable[[], None]) -> Callable[[], None]:
        """An attempt that was started elsewhere has taken over; `stack` is closed at its end.

        Return what is to be called some times a second with it.
        """
        self.forget()
        stack.enter_context(self._live.showing(job.job.context.job, LiveAttempt(job.job, job.attempt)))
        return self._looking(job, meanwhile)

    def _looking(self, job: JobHere | JobOverHosts, meanwhile: Callable[[], None]) -> Callable[[], None]:
        def look() -> None:
            self._look(job)
            meanwhile()

        return look

    def forget(self) -> None:
        """Drop what is prepared."""
        prepared, self._next = self._next, None
        self._has_begun = False
        if prepared is not None:
            prepared.close()

    def _look(self, present: JobHere | JobOverHosts) -> None:
        """Prepare the next attempt when the present one has made a step. On this machine alone, it starts at once."""
        if isinstance(present, JobHere):
            return
        if self._has_begun or self._keepers is None:
            self._open_ways()
            return
        if not any(record.step > record.first_step for record in present.attempt.records().values()):
            return
        self._next = PreparedJob(lambda stack: self._make_over_hosts(stack, present.job), is_idle=True)
        if self._next.error is not None:  # the next attempt will report it
            self.forget()
        self._has_begun, self._has_ways = True, False

    def _open_ways(self) -> None:
        """When the agents of the next attempt have logged in, log in for its mpiexec."""
        prepared = self._next
        if prepared is None or self._has_ways or not prepared.is_done() or prepared.error is not None:
            return
        self._has_ways = True
        with suppress(OSError):  # mpiexec logs in as always
            prepared.job.open_ways()

    def _take(self, stack: ExitStack, job: JobSpec) -> JobOverHosts | None:
        """Return `job` with agents and facts, if they are prepared and fit; they are closed with `stack`."""
        prepared, taken = self._next, None
        if prepared is not None and not job.placement.is_here:
            is_whole = job.placement.hosts == prepared.job.job.placement.hosts
            is_done = prepared.is_done(_FACTS_SECONDS_OF_ALL if is_whole else _FACTS_SECONDS)
            if is_done and prepared.error is None and prepared.job.becomes(job):
                stack.enter_context(prepared.stack.pop_all())
                taken = prepared.job
        self.forget()
        return taken
