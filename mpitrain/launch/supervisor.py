"""Sees a job through from its first attempt to the end of its last one: carries out what the policy says (policy.py).

    main thread   attempts, also the one that is prepared beside the present one: it alone starts processes
    tellers       what `mpitrain tell` and `scale` ask (control.py); a host that is to join is asked for its
                  facts first, which takes seconds
    intake        asks the hosts that an elastic job could have (intake.py)

All send events, one at a time. What starts or ends attempts waits for the main thread; the rest is done at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launch import events, lost_wait, policy
from mpitrain.launch.changes import FIRST_RUN, reads_inventory
from mpitrain.launch.ending import Ended, last_step, why
from mpitrain.launch.events import Action, Event, FailedAttempt, Find, JobState, Pause, Reply, Start
from mpitrain.launch.intake import Intake, that_let_in
from mpitrain.launch.keepers import KEEP_SECONDS, Keepers
from mpitrain.launch.kept import PREPARES, STAYS
from mpitrain.launch.live import Live
from mpitrain.launch.log import say
from mpitrain.launch.orders import Orders, teller_name
from mpitrain.launch.placement import Placement
from mpitrain.launch.successor import Successor

_LOOK_SECONDS = 0.2
# So long a request waits for an attempt or a run that is about to begin.
_BEGIN_SECONDS = 5.0


class Supervisor:
    """Use this in `with`, in the main thread: inside, requests are answered; at its end, no attempt is prepared.

    Attributes:
        state: what is known of the job.
        waits_for: the hosts for which the job waits without an attempt, and until when, in words; "": it does not wait.
    """

    def __init__(
        self,
        state: JobState,
        run: Callable[[Placement, Pause | None], Ended],
        keepers: Keepers | None,
        *,
        widen: Callable[[Placement, str], Placement],
        check: Callable[[Placement], None],
        prepare: Callable[[Placement, str], Successor | None],
        listed: Callable[[], Sequence[str] | None] | None = None,
        code: Callable[[int], int] = lambda code: code,
    ) -> None:
        """Nothing is started yet.

        Args:
            state: see policy.begin.
            run: runs an attempt on a placement to its end, and leaves nothing of it behind. It gets what ended the
                attempt before, if there was one.
            keepers: of the job; they tell its ranks. None: its hosts cannot change.
            widen: returns a placement with more hosts, from the text of --hosts. Raises ConfigError.
            check: raises LaunchError or ConfigError if a host of a placement cannot take part.
            prepare: starts the next attempt beside the present one, for a reason in words; None: it cannot.
            listed: returns the hosts that the inventory of an elastic job has now; None: it has no inventory. Raises
                ConfigError. None: the job is not elastic.
            code: returns the exit code of a job that is done, from 0.
        """
        self.state = state
        self.waits_for = ""
        self._run, self._keepers, self._widen, self._check = run, keepers, widen, check
        self._prepare, self._code = prepare, code
        self._waiting: deque[Action] = deque()  # for the main thread
        self._successor: Successor | None = None
        self._error: LaunchError | None = None  # with which the last attempt did not start
        self._looked, self._fault = 0.0, ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._intake = None
        if listed is not None:
            self._intake = Intake(self.take, lambda: reads_inventory(self.state), listed, self._stop)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._intake is not None:
            self._intake.close()
        self._drop()

    def to_end(self, silent: Sequence[str] = ()) -> int:
        """Make attempts until none follows. Return the exit code: 0 only if the last one did its work.

        `silent` are the hosts that do not answer now.

        Raises:
            LaunchError: an attempt could not be started, even without the hosts that are set aside.
        """
        if self._intake is not None:
            self._intake.begin()
        self.take(events.JobBegun(time.monotonic(), tuple(silent)))
        while True:
            match self._waiting.popleft():
                case Start() as start:
                    self.take(self._attempt(start))
                case events.Wait():
                    self._wait()
                case events.LeaveState(why=why_left):
                    say(self._leave_state(why_left))
                case events.End() as end:
                    if end.is_error and self._error is not None:
                        raise self._error
                    return end.code
                case action:
                    self._prepare_or_drop(action)

    def take(self, event: Event) -> Reply | None:
        """Take in an event, and do what follows. Return the answer to who has asked. Any thread may call."""
        answer = None
        with self._lock:
            self.state, actions = policy.next(self.state, event)
            for action in actions:
                match action:
                    case (
                        Start() | events.Wait() | events.Prepare() | events.Drop() | events.LeaveState() | events.End()
                    ):
                        self._waiting.append(action)
                    case events.Tell(command=command) if self._keepers is not None:
                        self._keepers.wish = command
                    case events.Refuse() if self._keepers is not None:
                        self._keepers.refuses = True
        for action in actions:
            match action:
                case events.Say(text=text):
                    say(text)
                case Reply():
                    answer = action
                case Find():
                    answer = self._find(action)
                case events.AskHosts(hosts=hosts):
                    inside = that_let_in(hosts, self._stop)
                    if not self._stop.is_set():
                        self.take(events.Answered(time.monotonic(), hosts, frozenset(inside)))
        return answer

    def look(self) -> None:
        """In the main thread, some times a second while an attempt runs: hear its ranks, and prepare the next one."""
        try:
            self._look()
        except Exception as error:  # the job can train without it
            self._say_once(f"the hosts of the job may not change as they should: {error!r}")

    def _say_once(self, fault: str) -> None:
        if self._fault != fault:
            self._fault = fault
            say(fault)

    def _look(self) -> None:
        self._do_waiting()
        keepers, successor, now = self._keepers, self._successor, time.monotonic()
        if successor is not None:
            successor.look()
            if successor.problem:
                self.take(events.NotPrepared(now, successor.problem, successor.faulty, successor.has_room))
            elif self.state.command == PREPARES and successor.is_ready:
                self.take(events.Ready(now))
        if keepers is not None and now > self._looked + _LOOK_SECONDS:
            self._looked = now
            self.take(events.RanksSaid(now, keepers.run, keepers.is_ending, dict(keepers.told)))
        self._do_waiting()

    def _wait(self) -> None:
        """No attempt runs until enough hosts are there, or somebody or the time ends the wait."""
        waiting = self.state.waiting
        if waiting is None:  # it is over already
            return
        seconds = waiting.until - time.monotonic()
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        shown = ""
        try:
            while not self._waiting:
                waits = f"{', '.join(lost_wait.missing(self.state)) or 'more hosts'} until {until}"
                if waits != shown:
                    self._show_wait(waits)
                    shown = waits
                self._let_time_pass()
        except (KeyboardInterrupt, SystemExit) as end:  # SIGTERM and SIGHUP exit, see start.py
            code = 128 + signal.SIGINT if isinstance(end, KeyboardInterrupt) else end.code
            self._waiting.clear()  # a host may have joined at this moment
            self.take(events.Interrupted(time.monotonic(), int(code or 0)))
        finally:
            self._show_wait("")

    def _let_time_pass(self) -> None:
        try:
            self.take(events.Waited(time.monotonic()))
        except OSError as error:  # no ssh can be started now
            self._say_once(f"lost hosts cannot be asked whether they are back: {error}")
        time.sleep(_LOOK_SECONDS)

    def _show_wait(self, hosts: str) -> None:
        self.waits_for = hosts
        if self._keepers is not None:
            self._keepers.wait_for(hosts)

    def stop_wait(self, code: int = 0) -> Reply | None:
        """Have a job that waits for hosts save and end, with this exit code. None: it does not wait."""
        reply = self.take(events.StopAsked(time.monotonic(), code))
        return reply if reply is not None and reply.is_accepted else None

    def _do_waiting(self) -> None:
        while self._waiting:
            self._prepare_or_drop(self._waiting.popleft())

    def _prepare_or_drop(self, action: Action) -> None:
        if isinstance(action, events.Prepare):
            self._successor = self._prepare(action.where, action.cause)
            if self._successor is None:
                self.take(events.NotPrepared(time.monotonic()))
        else:
            assert isinstance(action, events.Drop)
            self._drop()

    def _drop(self) -> None:
        successor, self._successor = self._successor, None
        if successor is not None:
            successor.close()

    def _attempt(self, start: Start) -> Event:
        """Run an attempt to its end. Return how it ended."""
        where, keepers = self.state.now_on, self._keepers  # nobody else starts attempts, so it stays
        if keepers is not None:
            keepers.note(start.hosts)
            keepers.run, keepers.wish, keepers.told = 0, STAYS, {}
        try:
            if start.takes_over:
                taken, self._successor = self._successor, None  # the next one may be prepared beside it
                assert taken is not None
                ended = taken.to_end(self.look)
            else:
                ended = self._run(where, start.pause)
        except LaunchError as error:
            self._error = error
            return events.NotStarted(time.monotonic(), str(error), error.hosts, error.different)
        now, code = time.monotonic(), ended.code
        if ended.is_interrupted:
            return events.Interrupted(now, code)
        if ended.left is not None and keepers is not None:
            is_ready = self._successor is not None and self._successor.is_ready
            return events.Left(now, *ended.left, told=tuple(keepers.told), is_ready=is_ready)
        if code == 0:
            return events.Done(now, self._code(0))
        has_checkpoint = any(record.has_checkpoint for record in ended.records.values())
        return events.Failed(now, _failure(ended, where, now), has_checkpoint)

    def _leave_state(self, reason: str) -> str:
        """Leave the state to another launcher. Return where it is, and what to do."""
        keepers = self._keepers
        hosts = keepers.stay(reason) if keepers is not None else []
        if keepers is None or not hosts:
            return "no host has the state in memory; the same command continues from the newest checkpoint, if any"
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + KEEP_SECONDS))
        return (
            f"its state is kept in memory on {', '.join(hosts)} until {until}. To continue when more hosts can take "
            f"part: `mpitrain resume {keepers.of}`. To drop it: `mpitrain kill {keepers.of}`"
        )

    def answer(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Accept or refuse a change of hosts that somebody asks for: {"leave": [host...], "join": text}, or one."""
        self._wait_for_run()
        now = time.monotonic()
        leave = tuple(request.get("leave", ()))
        if leave and "join" not in request:
            answer = self.take(events.LeaveAsked(now, leave))
        else:
            answer = self.take(events.JoinAsked(now, str(request["join"]), leave))
        assert answer is not None
        return _plain(answer)

    def _wait_for_run(self) -> None:
        """Wait a moment for a run that can be left: who has just seen one attempt end knows nothing of the next."""
        deadline = time.monotonic() + _BEGIN_SECONDS
        while time.monotonic() < deadline and not self._stop.is_set():
            if (
                self.state.change is not None
                or self.state.waiting is not None
                or (self.state.is_running and self.state.run >= FIRST_RUN)
            ):
                return
            time.sleep(_LOOK_SECONDS / 4)

    def _find(self, find: Find) -> Reply | None:
        """Find out where the job would run with more hosts, and whether these can take part."""
        num_before = len(find.now_on.hosts)
        try:
            wider = self._widen(find.now_on, find.text)
            joined = wider.hosts[num_before:]
            addresses = {host: at for host, at in wider.addresses.items() if host in joined or host == wider.own}
            self._check(replace(wider, places=wider.places[num_before:], addresses=addresses))
            is_all = set(find.hosts.hosts) <= set(wider.hosts)
            hosts = wider if is_all else self._widen(find.hosts.without(set(joined)), find.text)
        except ConfigError as error:
            return self.take(events.Unfit(time.monotonic(), find, str(error)))
        except LaunchError as error:
            return self.take(events.Unfit(time.monotonic(), find, str(error), error.hosts, error.different))
        return self.take(events.Fit(time.monotonic(), find, wider, hosts))


def _failure(ended: Ended, placement: Placement, now: float) -> FailedAttempt:
    cause, rank = why(ended, placement.host_of)
    first = min((record.first_step for record in ended.records.values() if record.step), default=None)
    host = None if rank is None else placement.host_of(rank)
    failed_at = ended.first_end.seconds if ended.first_end else now
    return FailedAttempt(cause, ended.code, now, first, last_step(ended.records, rank), host, ended.lost, failed_at)


def _plain(reply: Reply) -> dict[str, str]:
    return {"accepted" if reply.is_accepted else "refused": reply.text}


def telling(live: Live, orders: Orders, supervisor: Supervisor | None) -> AbstractContextManager[None]:
    """Use this in `with`: inside, requests are answered that come to the socket of the launcher.

    Without `supervisor`, the hosts of the job cannot change.
    """

    def answer(wish: Mapping[str, Any]) -> Mapping[str, Any]:
        if "tell" in wish:
            if supervisor is not None and wish["tell"].get("kind") == "stop" and (reply := supervisor.stop_wait()):
                return _plain(reply)
            if supervisor is not None and (waits := supervisor.waits_for):
                return {"refused": f"it has no ranks now: it waits for {waits}. `stop` saves its state and ends it"}
            return orders.answer(wish["tell"], teller_name(os.geteuid(), str(wish.get("from", ""))))
        if supervisor is None:
            text = "its hosts cannot change, because no keepers hold its state meanwhile"
            return {"refused": f"{text}; start the job with --max-restarts N"}
        return supervisor.answer(wish)

    return live.telling(answer, orders.close)
