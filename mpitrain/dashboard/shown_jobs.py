"""The jobs that run now, as their launchers on this machine report them: one connection each, for all viewers."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpitrain.dashboard.machines import machines_of
from mpitrain.errors import LaunchError
from mpitrain.launch.live_jobs import LiveJob, find, launcher_of, sockets
from mpitrain.launch.live_picture import slow_rank, waiting_shares

LOOK_SECONDS = 1.0
_SEARCH_SECONDS = 1.0  # for sockets of launchers that are new
_SEARCH_ALL_SECONDS = 10.0  # also for jobs without a launcher, which takes a look at all processes
_MOST_LOOKS = 600  # of a job, for the grid of ranks and time
_SLOW_LOOKS = 11  # in which a slow rank is looked for
_MOST_WAITING = 0.5  # of the time between two looks in which a rank waits, and still counts as one that computes
_SILENT_SECONDS = 10.0  # after that, a launcher counts as one that hangs


@dataclass
class ShownJob:
    """What a launcher has reported.

    Attributes:
        look: its last answer (docs/reference/formats-and-protocols.md), with its `column` of the history.
        heard: when that came, by time.monotonic().
        launcher: which process that is (roster.launcher_name); "": a job of `mpitrain serve` has none.
        history: of each look the time, and the phase of every rank in the order of ranks. A rank that has mostly
            waited since the look before, always for less than 0.1 s, waits.
    """

    look: dict[str, Any]
    heard: float
    launcher: str = ""
    history: deque[tuple[float, list[str]]] = field(default_factory=lambda: deque(maxlen=_MOST_LOOKS))
    _looks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_SLOW_LOOKS))

    @property
    def slow(self) -> str:
        """The rank for which the others have waited in the last seconds, in a sentence; "": there is none."""
        return slow_rank(list(self._looks))

    @property
    def machines(self) -> list[dict[str, Any]]:
        """What its hosts do in a step, those that compute longest first."""
        return machines_of(list(self._looks))

    @property
    def ids(self) -> list[str]:
        """The ids of its attempts, the first one first."""
        return [str(one) for one in self.look["ids"]]

    @property
    def is_silent(self) -> bool:
        """The launcher has not sent anything for a long time."""
        return time.monotonic() - self.heard > _SILENT_SECONDS

    def take(self, look: dict[str, Any]) -> None:
        """Note a look."""
        waiting = waiting_shares([self._looks[-1], look]) if self._looks else {}
        waits = {rank for rank, share in waiting.items() if share > _MOST_WAITING}
        phases = [
            "waits" if entry["phase"] == "computes" and entry["rank"] in waits else str(entry["phase"])
            for entry in look["ranks"]
        ]
        # First the history: other threads read both, and a look without its column would be shown.
        self.history.append((float(look["at"]), phases))
        self._looks.append(look)
        self.look, self.heard = {**look, "column": phases}, time.monotonic()


class ShownJobs:
    """All live jobs of this user on this machine. Threads listen to them, because each may hang.

    Attributes:
        jobs: by the socket of the launcher, or by the id of a job that has none.
        problem: why launchers cannot be looked for or listened to; "": they can.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each look, and when a launcher has gone, in any thread."""
        self.jobs: dict[str, ShownJob] = {}
        self.problem = ""
        self._on_change = on_change
        self._end = threading.Event()

    def begin(self) -> None:
        """Begin to look for launchers and to listen to them."""
        threading.Thread(target=self._search, name="jobs", daemon=True).start()

    def end(self) -> None:
        """Stop listening. Does not wait."""
        self._end.set()

    def _search(self) -> None:
        next_search = 0.0
        while not self._end.is_set():
            jobs: list[LiveJob] = []
            try:
                if time.monotonic() >= next_search or any(str(path) not in self.jobs for path in sockets()):
                    jobs, wrong = find()
                    self.problem = "; ".join(wrong)
                    next_search = time.monotonic() + _SEARCH_ALL_SECONDS
            except (LaunchError, OSError) as error:
                self.problem = str(error)
            for job in jobs:
                name = str(job.path or job.answer["job"])
                if name not in self.jobs:
                    launcher = launcher_of(job.path) if job.path is not None else ""
                    self.jobs[name] = ShownJob(dict(job.answer), time.monotonic(), launcher)
                    threading.Thread(target=self._listen, args=(name, job), name=name, daemon=True).start()
            self._end.wait(_SEARCH_SECONDS)

    def _listen(self, name: str, job: LiveJob) -> None:
        try:
            source = job.watch(LOOK_SECONDS)
            try:
                while not source.is_closed and not self._end.is_set():
                    look = source.receive(LOOK_SECONDS)
                    if look is None:
                        continue
                    if "error" in look:
                        self.problem = str(look["error"])
                        break
                    self.jobs[name].take(look)
                    self._on_change()
            finally:
                source.close()
        except LaunchError:  # it has just ended
            pass
        except (ValueError, TypeError, KeyError) as error:
            print(f"mpitrain dashboard: job {name} sends an invalid look: {error!r}", file=sys.stderr, flush=True)
        finally:
            del self.jobs[name]
            self._on_change()
