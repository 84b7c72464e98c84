"""Changes of the hosts of a running job: answers the wishes.

    wish ─> can it be? ─┬─> "accepted" ─> the next attempt starts, on other hosts (successor.py) ─> keepers ─> ranks end
                        │                                                               after their next copy
                        └─> "refused", and why; the job does not notice

Only the first run of a script can be left and gone on with: a later one would have to begin with it. A run is that of
a Trainer, or a loop with mt.keep.

A thread answers, because a host that is to join is asked for its facts first. Only the main thread starts processes.
If the next attempt cannot start beside the present one, it starts when the present one has ended.

`Tellers` opens the socket to which the wishes of `mpitrain tell` and `scale` come (control.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mpitrain.errors import ConfigError, LaunchError, NotNowError
from mpitrain.launch.control import listen, serve
from mpitrain.launch.keepers import KEEP_SECONDS, Keepers
from mpitrain.launch.kept import LEAVES, PREPARES, SAVES, STAYS
from mpitrain.launch.log import say
from mpitrain.launch.orders import Orders, teller_name
from mpitrain.launch.placement import Placement
from mpitrain.launch.policy import READY_SECONDS, Change, Limits, change_of, leaving
from mpitrain.launch.roster import launcher_name
from mpitrain.launch.successor import Successor
from mpitrain.watching.ranges import rank_ranges

_LOOK_SECONDS = 0.2
_RUN = 1
# mpiexec sends SIGTERM to ranks too, when it ends them because of another one, whose end is heard within this time.
_SETTLE_SECONDS = 1.5
# A host that is about to be taken away has less time than READY_SECONDS.
_READY_SECONDS_OF_TOLD = 10.0
# So long a wish waits for an attempt or a run that is about to begin.
_BEGIN_SECONDS = 5.0
_STARTS = "the job is being started again; try again in a moment"


class Changes:
    """Use this in `with`: inside, wishes are answered. `look` continues with them.

    Attributes:
        bad: the hosts that could not take part when an attempt was about to start, or to take over, each with the time.
    """

    def __init__(
        self,
        keepers: Keepers,
        limits: Limits,
        widen: Callable[[Placement, str], Placement],
        check: Callable[[Placement], None],
        prepare: Callable[[Placement, str], Successor | None],
    ) -> None:
        """No wish is answered yet.

        Args:
            keepers: of the job; they tell its ranks.
            limits: the fewest and the most hosts.
            widen: returns a placement with more hosts, from the text of --hosts. Raises ConfigError.
            check: raises LaunchError or ConfigError if a host of a placement cannot take part.
            prepare: starts the next attempt beside the present one, for a reason in words; None: it cannot.
        """
        self.bad: list[tuple[float, str]] = []
        self._keepers, self._limits, self._widen, self._check = keepers, limits, widen, check
        self._prepare = prepare
        self._next: tuple[Change, Successor] | None = None
        self._taken: Successor | None = None  # the newest that has been taken; perhaps it has not been run to its end
        self._prepared_since = 0.0
        self._hosts: Placement | None = None
        self._now_on: Placement | None = None
        self._change: Change | None = None
        self._saves_for = ""
        self._told: dict[str, int] = {}  # the hosts that are to leave because SIGTERM told a rank there to end
        self._heeded: set[int] = set()  # the ranks of this attempt of which that is known
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="changes", daemon=True)

    def __enter__(self) -> Changes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * _LOOK_SECONDS)
        self._close_next()
        if self._taken is not None:
            self._taken.close()

    def begin(self, hosts: Placement, now_on: Placement, saves_for: str = "") -> None:
        """An attempt is about to begin on `now_on`; those of `hosts` that are not in it are set aside.

        With `saves_for`, a reason in words, the try only saves the state of the job, and no wish is accepted.
        """
        with self._lock:
            self._hosts, self._now_on, self._saves_for = hosts, now_on, saves_for
            self._keepers.note(hosts)
            self._keepers.run, self._keepers.wish, self._keepers.told = 0, STAYS, {}
            self._heeded = set()
            self._told = {host: rank for host, rank in self._told.items() if host in now_on.hosts}

    def leave_state(self, why: str) -> str:
        """After the last attempt: leave the state to another launcher, for a reason in words.

        Return where it is, and what to do; "": nobody has it.
        """
        hosts, job = self._keepers.stay(why), self._keepers.of
        if not hosts:
            return ""
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + KEEP_SECONDS))
        return (
            f"its state is kept in memory on {', '.join(hosts)} until {until}. To continue when more hosts can take "
            f"part: `mpitrain resume {job}`. To drop it: `mpitrain kill {job}`"
        )

    def take(self, *, has_left: bool = False) -> Change | None:
        """After an attempt: the change that was accepted meanwhile. Until `begin`, no wish is accepted.

        Args:
            has_left: the ranks have ended for a change. A host that SIGTERM has told to leave just before is not
                forgotten.
        """
        with self._lock:
            if has_left and self._now_on is not None:
                self._told |= {self._now_on.host_of(rank): rank for rank in self._keepers.told.keys() - self._heeded}
            change, self._change, self._now_on = self._change, None, None
            return change

    def take_next(self, change: Change | None) -> Successor | None:
        """After `take`: the try that continues for this change. It takes over now. None: none is ready."""
        if self._next is None or self._next[0] is not change or not self._next[1].is_ready:
            self._close_next()
            return None
        _, self._taken = self._next
        self._next = None
        return self._taken

    def look(self) -> None:
        """In the main thread, some times a second while an attempt runs: prepare the next one, if there is a change."""
        with self._lock:
            change, is_prepared = self._change, self._keepers.wish == PREPARES
        if self._next is not None and self._next[0] is not change:  # the change was dropped
            self._close_next()
        if change is None:
            return
        if self._next is None:
            if is_prepared:
                self._begin_next(change)
            return
        _, successor = self._next
        successor.look()
        if not successor.problem and is_prepared and time.monotonic() - self._prepared_since > change.ready_seconds:
            successor.has_room = False
            self._go_without(change, successor, f"its ranks were not ready within {change.ready_seconds:g} s")
        elif successor.problem:
            self._go_without(change, successor, successor.problem)
        elif is_prepared and successor.is_ready:
            self._tell(change, LEAVES)

    def _begin_next(self, change: Change) -> None:
        successor = self._prepare(change.now_on, change.text)
        if successor is None:
            self._tell(change, LEAVES)
        else:
            self._next, self._prepared_since = (change, successor), time.monotonic()

    def _go_without(self, change: Change, successor: Successor, problem: str) -> None:
        """The next attempt cannot be prepared: drop the hosts that would join, or let the present ranks end first."""
        self._close_next()
        with self._lock:
            is_dropped = bool(change.joined) and successor.has_room and self._keepers.wish == PREPARES
            if is_dropped and self._change is change:
                self._change, self._keepers.wish = None, STAYS
        if is_dropped:
            blamed = [host for host in change.joined if host in successor.faulty or not successor.faulty]
            self.bad += [(time.monotonic(), host) for host in blamed]
            say(f"the job continues as before, without {', '.join(change.joined)}: {problem}")
        else:
            say(f"the next attempt cannot start beside this one: {problem}. It starts when this one has ended")
            self._tell(change, LEAVES)

    def _close_next(self) -> None:
        if self._next is not None:
            self._next[1].close()
            self._next = None

    def _tell(self, change: Change, wish: int) -> None:
        with self._lock:
            if self._change is change:
                self._keepers.wish = wish

    def answer(self, wish: Mapping[str, Any]) -> dict[str, str]:
        """Accept or refuse a wish of somebody."""
        self._wait_for_run()
        try:
            change = self.accept(wish)
        except (ConfigError, LaunchError) as error:
            return {"refused": str(error)}
        return {"accepted": f"{change.text} after the next copy of its state; then it continues on {change.where}"}

    @property
    def is_open(self) -> bool:
        """True if a change could be accepted now."""
        with self._lock:
            is_free = self._now_on is not None and self._change is None and not self._saves_for
            return is_free and self._keepers.run == _RUN and not self._keepers.is_ending

    def accept(self, wish: Mapping[str, Any]) -> Change:
        """Accept a wish; `look` continues with it. Takes seconds for a host that joins: call this in a thread.

        Raises:
            NotNowError: the hosts of the job cannot change now.
            ConfigError: this change cannot be.
            LaunchError: a host that would join does not answer, or differs.
        """
        with self._lock:
            self._refuse_now()
            hosts, now_on = self._hosts, self._now_on
        assert hosts is not None
        assert now_on is not None
        change = change_of(wish, hosts, now_on, self._limits, self._widen, self._check)
        with self._lock:
            self._refuse_now()
            if self._now_on is not now_on:
                raise NotNowError(_STARTS)
            self._change, self._keepers.wish = change, PREPARES
        return change

    def let_go(self, leave: list[str], why: str) -> None:
        """Let these hosts leave, or if too few would be left, let the job save and end, for a reason in words.

        Raises:
            NotNowError: the hosts of the job cannot change now.
        """
        with self._lock:
            self._refuse_now()
            why_end = f"{', '.join(leave)} can no longer take part ({why}), and {self._limits.words}"
            said = self._part(leave, why, why_end)
        say(said)

    def _wait_for_run(self) -> None:
        """Wait a moment for a run that can be left: a user who has just seen one try end knows nothing of the next."""
        deadline = time.monotonic() + _BEGIN_SECONDS
        while time.monotonic() < deadline and not self._stop.is_set():
            with self._lock:
                if self._change is not None or (self._now_on is not None and self._keepers.run >= _RUN):
                    return
            time.sleep(_LOOK_SECONDS / 4)

    def _refuse_now(self) -> None:
        if self._hosts is None or self._now_on is None:
            raise NotNowError(_STARTS)
        if self._change is not None:
            raise NotNowError(f"another change is under way: {self._change.text}")
        if self._saves_for:
            raise NotNowError(f"the job only saves its state, because {self._saves_for}")
        if self._keepers.run > _RUN:
            raise NotNowError(
                f"it is in run {self._keepers.run} of its script, and the hosts of a job change in the first one only"
            )
        if self._keepers.run < _RUN:
            raise NotNowError(
                "the hosts of a job change while a Trainer, or a loop with mt.keep, copies its state to memory, and "
                "none does so now. If its training is about to begin, try again in a moment"
            )

    def _drop_if_late(self) -> None:
        """If the run is over that was to change its hosts, say so: there is nothing to continue with."""
        with self._lock:
            if (change := self._change) is None or self._keepers.run == _RUN:
                return
            self._change, self._keepers.wish = None, STAYS
        say(f"the training ended before the hosts of the job could change: {change.text}")

    def _look_at_told(self) -> None:
        """Let the hosts leave on which SIGTERM has told a rank to end, if the job is healthy."""
        with self._lock:
            hosts, now_on, keepers = self._hosts, self._now_on, self._keepers
            if hosts is None or now_on is None:
                return
            if not keepers.is_ending:
                settled = time.monotonic() - _SETTLE_SECONDS
                told = {rank for rank, since in tuple(keepers.told.items()) if since < settled}
                self._told |= {now_on.host_of(rank): rank for rank in sorted(told - self._heeded)}
                self._heeded |= told
            leave = [host for host in now_on.hosts if host in self._told]
            if not leave or self._change is not None or keepers.is_ending:
                return
            if keepers.run != _RUN and not keepers.told:  # since the attempt before; this one has not begun its run yet
                return
            ranks = rank_ranges(sorted(self._told.pop(host) for host in leave))
            why = f"SIGTERM told rank{'s' * (len(leave) > 1)} {ranks} to end"
            if keepers.run != _RUN:
                keepers.refuses = True
                where = f"this is run {keepers.run}" if keepers.run else "there is none now"
                only = "the hosts of a job change in the first run of a Trainer, or loop with mt.keep, only"
                say(f"{why}, and {only}; {where}. A failure follows")
                return
            said = self._part(leave, why, f"{why} on {', '.join(leave)}", _READY_SECONDS_OF_TOLD)
        say(said)

    def _part(self, leave: list[str], why: str, why_end: str, ready_seconds: float = READY_SECONDS) -> str:
        """Begin a change without these hosts, or the end if too few are left; return what to say. Hold the lock."""
        assert self._hosts is not None
        assert self._now_on is not None
        if len(set(self._now_on.hosts) - set(leave)) >= max(1, self._limits.min_nodes):
            change = leaving(self._hosts, self._now_on, leave)
            self._change = replace(change, text=f"{change.text} ({why})", ready_seconds=ready_seconds)
            self._keepers.wish = PREPARES
            follows = f"it continues on {change.where}"
        else:
            self._change = Change(why_end, self._hosts, self._now_on, is_end=True)
            self._keepers.wish = SAVES
            follows = "the job saves and ends"
        return f"{self._change.text}; after the next copy of the state, {follows}"

    def _look(self) -> None:
        fault = ""
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                self._drop_if_late()
                self._look_at_told()
            except Exception as error:  # nobody looks at a thread's error, and the job can train without it
                if fault != repr(error):
                    fault = repr(error)
                    say(f"the hosts of the job may not change as they should: {fault}")


_LAST_SECONDS = 1.5


class Tellers:
    """Use this in `with`: inside, wishes are answered."""

    def __init__(self, orders: Orders, changes: Changes | None) -> None:
        """Without `changes`, the hosts of the job cannot change."""
        self._orders, self._changes = orders, changes
        self._listener: socket.socket | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Tellers:
        """Open the socket. If that cannot be, stderr says so: the job does not need it."""
        try:
            self._listener = listen(launcher_name(os.getpid()))
        except OSError as error:
            say(f"nobody can tell this job anything (mpitrain tell, scale): {error}")
            return self
        serves = self._listener, self._answer, self._stop
        self._thread = threading.Thread(target=serve, args=serves, name="wishes", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)  # a host may be asked, which takes longer
        if self._listener is not None:
            self._listener.close()

    def _answer(self, wish: Mapping[str, Any], user: int) -> Mapping[str, Any]:
        if "tell" in wish:
            return self._orders.answer(wish["tell"], teller_name(user, str(wish.get("from", ""))))
        if self._changes is None:
            text = "its hosts cannot change, because no keepers hold its state meanwhile"
            return {"refused": f"{text}; start the job with --max-restarts N"}
        return self._changes.answer(wish)
