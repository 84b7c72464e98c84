"""Makes the planned faults in a running job, one after the other, and records how the job continues."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from mpitrain.errors import LaunchError
from mpitrain.watching.rank_record import BEGUN, DONE, PARTED
from testbed.chaos.crew import OUTAGES, Crew
from testbed.chaos.episode import Episode, Hit, Point, went_on
from testbed.chaos.plan import Fault

_TICK_SECONDS = 0.05
_OF_SABOTEUR = ("rank", "freeze", "disk")
# A saboteur looks closely for twice as long.
_CLOSELY_SECONDS = 1.5
# After a cable was pulled, ranks may still begin the step after the one that they are in.
_SETTLE_SECONDS = 0.2
# Bed.start waits that long for a node, and chaos for its undoing.
_UNDO_SECONDS = 150.0
_LEFT_SECONDS = 30.0


class Conductor:
    """Runs until the job has ended, or until a signal."""

    def __init__(
        self,
        crew: Crew,
        faults: Iterator[Fault],
        *,
        hold_seconds: float,
        pause_seconds: float,
        apart: str,
        say: Callable[[str], None],
    ) -> None:
        """A fault lasts for `hold_seconds`; between two, the job continues for `pause_seconds` at least.

        `apart` is the launcher's host; `say` is told what is done.
        """
        self.episode = Episode()
        self._crew, self._faults, self._apart, self._say = crew, faults, apart, say
        self._hold_seconds, self._pause_seconds = hold_seconds, pause_seconds
        self._began = 0.0  # when the job made its first step under chaos
        self._tokens: list[str] = []
        self._ranks: dict[str, list[dict[str, Any]]] = {}  # by host
        self._launched = False  # the launcher has been seen alive
        self._lived = 0.0  # when a rank was last seen alive, by the clock of the crew
        self._settles = float("inf")
        self._looked = 0.0
        self._signals: list[int] = []
        self._folders: list[str] = []

    def run(self) -> None:
        """Make the faults until the job has ended.

        Raises:
            LaunchError: hosts do not answer; the job's launcher is on none of them; a cable or power is still cut.
        """
        greetings = self._crew.greetings()
        self.episode.hears = greetings.get(self._apart, {}).get("hears", False)
        refusals = {host: greeting["disk"] for host, greeting in greetings.items()}
        self._folders = [host for host, refusal in refusals.items() if not refusal]
        if not self._folders:
            raise LaunchError("; ".join(f"{host}: {refusal}" for host, refusal in refusals.items()))
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            self._conduct()
        finally:
            self._undo()
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def interrupted(self) -> int:
        """The signal that has ended chaos; 0: none."""
        return self._signals[0] if self._signals else 0

    def _conduct(self) -> None:
        fault = next(self._faults, None)
        while not self._signals:
            self._take(self._crew.exchange(_TICK_SECONDS))
            if self.episode.has_ended:
                self._ask_what_is_left()
                return
            self._crew.reconnect()
            self._tell_news()
            if not self._began:
                point = self._now_at()
                if point is None:
                    continue
                self._began = time.monotonic()
                self.episode.points.append(point)
            self._look_on()
            if fault is not None and self._seconds() >= fault.seconds and self._is_ready():
                self._make(fault)
                fault = next(self._faults, None)

    def _seconds(self) -> float:
        return time.monotonic() - self._began if self._began else 0.0

    def _take(self, messages: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        for host, message in messages:
            if "ranks" in message:
                self._take_ranks(host, message)
            self.episode.said += [(self._seconds(), line) for line in message.get("said", [])]
            if "left" in message:
                self.episode.left[host] = message["left"]
            hit = self.episode.hits[-1] if self.episode.hits else None
            if hit is None or hit.fault.number not in (message.get(key) for key in ("done", "refused", "undone")):
                if "closed" in message and host == OUTAGES:
                    raise LaunchError(
                        "the process that breaks and repairs the test bed has ended: `scripts/testbed status` shows "
                        "what is broken, `scripts/testbed heal all` repairs it"
                    )
                if "closed" in message and hit is not None and hit.host == host and hit.fault.kind in _OF_SABOTEUR:
                    hit.is_undone = True  # by the keeper of the outage
                    hit.why_not = "" if hit.deed else f"the connection to {host} has closed"
            elif "done" in message:
                hit.deed, hit.step = message["deed"], message["step"] or None
                hit.seconds = self._seconds() - message["ago_seconds"]
                if hit.step is None:
                    self._settles = time.monotonic() + _SETTLE_SECONDS
                self._say(f"fault {hit.fault.number}, {hit.fault.kind}: {hit.victim}: {hit.deed}")
            elif "refused" in message:
                hit.why_not, hit.is_undone = message["why"], True
                self._say(f"fault {hit.fault.number}, {hit.fault.kind}: skipped: {hit.why_not}")
            else:
                hit.is_undone = True
                self._say("    undone")

    def _take_ranks(self, host: str, message: Mapping[str, Any]) -> None:
        self._ranks[host] = message["ranks"]
        if any(rank["is_alive"] for rank in message["ranks"]):
            self._lived = self._crew.now()
        for rank in message["ranks"]:
            if rank["token"] not in self._tokens:
                self._tokens.append(rank["token"])
        if host == self._apart:
            self.episode.has_ended = self._launched and not message["launcher"]
            self._launched = self._launched or message["launcher"]
        point = self._now_at()
        if self._began and point is not None:
            self.episode.points.append(point)

    def _attempt(self) -> int:
        """Return the number of the job's attempt that trains, or was the last to train; at first, of the newest.

        An attempt that only waits until it takes over, for a change of hosts, may never train.
        """
        trained = {rank["token"] for ranks in self._ranks.values() for rank in ranks if rank["step"]}
        numbers = [number for number, token in enumerate(self._tokens, 1) if token in trained]
        return numbers[-1] if numbers else len(self._tokens)

    def _of_attempt(self) -> dict[int, dict[str, Any]]:
        """Return the ranks of this attempt, each with its host."""
        token = self._tokens[self._attempt() - 1]
        return {
            rank["rank"]: {**rank, "host": host}
            for host, ranks in self._ranks.items()
            for rank in ranks
            if rank["token"] == token
        }

    def _now_at(self) -> Point | None:
        """Return where the job is; None: it has not made a step yet."""
        if not self._tokens:
            return None
        ranks = self._of_attempt()
        step = max((rank["step"] for rank in ranks.values()), default=0)
        if not step and not self._began:
            return None
        working = [rank for number, rank in sorted(ranks.items()) if rank["is_alive"] and number not in _lost(ranks)]
        speed = next((rank["samples_per_second"] for rank in working if rank["samples_per_second"]), 0.0)
        first = min((rank["first_step"] for rank in ranks.values() if rank["first_step"]), default=0)
        is_done = not _failure(ranks)
        return Point(self._seconds(), self._attempt(), first, step, len(working), speed, is_done)

    def _is_ready(self) -> bool:
        """Return whether the next fault may come: the last one is undone, and the job has gone on since then."""
        hit = self.episode.hits[-1] if self.episode.hits else None
        if hit is None or hit.why_not:
            return hit is None or hit.is_undone
        if hit.went_on is None or not hit.is_undone:
            return False
        return self._seconds() >= hit.seconds + hit.went_on.seconds + self._pause_seconds

    def _targets(self) -> dict[int, str]:
        """Return the host of each rank that is between its start and its end."""
        ranks = self._of_attempt()
        return {
            number: rank["host"]
            for number, rank in ranks.items()
            if rank["is_alive"] and rank["phase"] == BEGUN and number not in _lost(ranks)
        }

    def _make(self, fault: Fault) -> None:
        targets = self._targets()
        hit = Hit(fault, self._seconds(), None, "", len(self._tokens))
        self.episode.hits.append(hit)
        try:
            recovers = any(rank["recovers"] for rank in self._of_attempt().values())
            if fault.kind == "rank" and recovers and len(targets) == 1:
                raise LookupError("one rank is left, and the job would end with it")
            hit.rank, hit.host = fault.victim(targets, self._apart, self._folders)
        except LookupError as error:
            hit.why_not = str(error)
            self._say(f"fault {fault.number}, {fault.kind}: skipped: {hit.why_not}")
            return
        self._crew.send_all({"look": 1})
        self._looked = time.monotonic()
        order = {
            "fault": fault.number,
            "kind": fault.kind,
            "token": self._tokens[-1],
            "rank": hit.rank,
            "host": hit.host,
            "seconds": self._hold_seconds,
        }
        if not self._crew.send(hit.host if fault.kind in _OF_SABOTEUR else OUTAGES, order):
            hit.why_not = f"there is no connection to {hit.host}"
            return
        hit.is_undone = fault.kind == "rank"

    def _look_on(self) -> None:
        """See whether the job has gone on after the last fault."""
        hit = self.episode.hits[-1] if self.episode.hits else None
        if hit is None or hit.went_on is not None or hit.why_not:
            return
        if time.monotonic() - self._looked > _CLOSELY_SECONDS:
            self._looked = time.monotonic()
            self._crew.send_all({"look": 1})
        if hit.step is None:
            if time.monotonic() < self._settles:
                return
            hit.step, self._settles = self.episode.points[-1].step, float("inf")
        recent = [point for point in self.episode.points if point.seconds > hit.seconds - 60.0]
        hit.went_on = went_on(recent, hit.seconds, hit.attempt, hit.step)
        if hit.went_on is not None:
            again = f", from step {hit.went_on.from_step}" if hit.went_on.from_step else ""
            self._say(f"    the job continued after {hit.went_on.seconds:.2f} s{again}")

    def _tell_news(self) -> None:
        for line in self._crew.news():
            self.episode.news.append((self._seconds(), line))
            self._say(line)

    def _ask_what_is_left(self) -> None:
        asked: set[str] = set()
        deadline = self._crew.now() + _LEFT_SECONDS
        while (silent := self._ranks.keys() - self.episode.left.keys()) and self._crew.now() < deadline:
            asked |= {host for host in silent - asked if self._crew.send(host, {"end": 1})}
            messages = self._crew.exchange(_TICK_SECONDS)
            asked -= {host for host, message in messages if "closed" in message}
            self._take(messages)
            self._crew.reconnect()
        for host in silent:
            self.episode.left[host] = ["unknown, because this host does not answer"]
        # A saboteur that was not there before all ranks had ended has not seen those that did the last of the work.
        self.episode.unseen = sorted(silent | self._crew.seen_after(self._lived))
        self._look_on()
        self.episode.error = _failure(self._of_attempt()) if self._tokens else "no rank has started"

    def _undo(self) -> None:
        """Undo all faults in force, and wait until that is done."""
        for host in {hit.host for hit in self.episode.hits if not hit.is_undone}:
            self._crew.send(host, {"undo": 1})
            self._crew.send(OUTAGES, {"undo": 1})
        deadline = self._crew.now() + _UNDO_SECONDS
        while not all(hit.is_undone for hit in self.episode.hits) and self._crew.now() < deadline:
            self._take(self._crew.exchange(_TICK_SECONDS))
        self.episode.seconds = self._seconds()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)


def _lost(ranks: Mapping[int, Mapping[str, Any]]) -> set[int]:
    return {lost for rank in ranks.values() for lost in rank["lost"]}


def _has_ended(rank: Mapping[str, Any]) -> bool:
    """Whether a rank has done its work, so far; one that dies while it waits for the others has not."""
    return bool(rank["phase"] == PARTED or (rank["phase"] == DONE and rank["is_alive"]))


def _failure(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Say why these ranks have not done the job's work; "": they have."""
    lost = _lost(ranks)
    for number, rank in sorted(ranks.items()):
        if rank["error"]:
            return f"rank {number} on {rank['host']} failed: {rank['error']}"
    missing = [number for number, rank in sorted(ranks.items()) if not _has_ended(rank) and number not in lost]
    if missing:
        return f"rank {missing[0]} on {ranks[missing[0]]['host']} did not reach its end"
    size = max((rank["size"] for rank in ranks.values()), default=1)
    return "" if len(ranks) >= size else f"{len(ranks)} of {size} ranks have begun"
