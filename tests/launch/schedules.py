"""Schedules of faults and requests for a job, and what must hold in all of them. Only the policy is real.

A schedule is a text of bytes: each is a choice among what may happen next. When they are used up, all goes well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from history import ABC, names, widen

from mpitrain.launch import events, policy
from mpitrain.launch.events import Event, FailedAttempt, Limits, Pause
from mpitrain.launch.kept import LEAVES, PREPARES, SAVES, STAYS
from mpitrain.launch.where import WAIT_SECONDS

HOSTS = widen(ABC, "d")
LIMITS = [
    *(Limits(restarts, least) for restarts in (3, 0, 1, None, 9) for least in (1, 2, 3)),
    *(Limits(restarts, least, most) for restarts in (5, 9) for least, most in ((1, 4), (2, 3), (1, 2), (3, 5))),
]
MOST_QUIET = 40
_NAPS = 0.1, 1.0, 20.0, 70.0, 130.0, 700.0, 4000.0


class Schedule:
    """A job that is driven by choices. `play` raises AssertionError where something does not hold."""

    def __init__(self, choices: bytes) -> None:
        self._choices = iter(choices)
        self.limits = self.pick(LIMITS)
        self.is_resumed = self.pick([False, False, self.limits.most_restarts > 0])
        pause = Pause("the launcher on a was lost", 7, 0.0) if self.is_resumed else None
        self.state = policy.begin(self.limits, HOSTS, pause)
        self.at = 0.0
        self.story: list[object] = [self.limits]
        self.is_running = self.is_over = self.may_start = False
        self.prepared: str | None = None
        self.is_ready = False
        self.holders = set(names(HOSTS)) if self.is_resumed else set[str]()  # who has the state in memory
        self.step = 6 if self.is_resumed else 0  # the last that is kept
        self.has_checkpoint = self.has_stepped = self.is_resumed
        self.first, self.is_copied = self.step, False  # of this attempt
        self.num_restarts = 0
        self.failures: list[FailedAttempt] = []
        self.away: list[tuple[float, str]] = []
        self.present: set[str] = set()
        self.command, self.has_left = STAYS, False
        self.dropped: set[str] = set()
        self.there: set[str] = set()  # the hosts that can take part, while the job waits for others
        self.wait_ends = 0.0  # when waits must end; 0: a step was made since

    def pick(self, options: Sequence[Any]) -> Any:
        return options[next(self._choices, 0) % len(options)]

    def host(self) -> str:
        return self.pick(names(self.state.now_on))

    def play(self) -> None:
        silent = () if not self.is_resumed else tuple(self.pick(["", "", "b", "bc", "ab"]))
        self.away += [(self.at, host) for host in silent]
        self.take(events.JobBegun(self.at, silent), gone=silent)
        quiet = 0
        while not self.is_over:
            choice = next(self._choices, None)
            quiet += choice is None
            assert quiet < MOST_QUIET, "it does not end"
            quiet_nap = 0.1 if self.state.waiting is None else 70.0
            self.at += quiet_nap if choice is None else self.pick(_NAPS)
            options = self.options()
            self.happen("goes well" if choice is None else options[choice % len(options)])

    def options(self) -> Sequence[str]:
        """What may happen now."""
        if not self.limits.most_restarts:  # nobody speaks with the ranks
            return "goes well", "killed", "lost", "not started", "interrupted"
        if self.state.waiting is not None:
            return _WAITS
        if self.state.saves_for:
            return _SAVES
        if self.has_left:
            return _LEAVES
        if self.prepared is not None:
            return _PREPARES
        return _BEGINS if self.may_start else _TRAINS

    def happen(self, what: str) -> None:
        """Something happens, if it can now."""
        state, now_on = self.state, names(self.state.now_on)
        if what == "waited" or (what == "goes well" and state.waiting is not None):
            self.take(events.Waited(self.at))
        elif what == "stop asked":
            self.take(events.StopAsked(self.at, self.pick([0, 138])))
        elif what == "goes well":
            if state.saves_for or self.command in (LEAVES, SAVES):
                self.leave()
            elif not self.is_copied:
                self.copy()
            else:
                self.take(events.Done(self.at, self.pick([0, 0, 138])))
        elif what == "copy":
            self.copy()
        elif what == "second run":
            self.take(events.RanksSaid(self.at, self.pick([0, 2])))
        elif what == "told":
            ranks = {state.now_on.places[self.pick(range(len(now_on)))].first_rank: self.at - 9.0}
            self.take(events.RanksSaid(self.at, state.run, self.pick([False, True]), ranks))
        elif what == "killed":
            self.fail(host=self.host())
        elif what == "lost":
            self.fail(gone=tuple(dict.fromkeys([self.host(), self.host()])))
        elif what == "not started" and self.may_start:
            gone = tuple(dict.fromkeys(self.pick(["", self.host(), self.host() + self.host()])))
            different = {self.host(): "numpy 2"} if self.pick([False, True]) else {}
            self.not_started(gone, {host: text for host, text in different.items() if host not in gone})
        elif what == "interrupted":
            self.take(events.Interrupted(self.at, 130))
        elif what == "left" and (self.has_left or state.saves_for):
            self.leave()
        elif what == "ready":
            self.is_ready = self.prepared is not None
            self.take(events.Ready(self.at))
        elif what == "not prepared" and self.prepared is not None:
            faulty = self.pick(["", "a", "d"])
            self.take(events.NotPrepared(self.at, self.pick(["x", ""]), tuple(faulty), self.pick([True, False])))
        elif what == "leave asked":
            self.take(events.LeaveAsked(self.at, tuple(dict.fromkeys([self.host(), self.pick("abcde")]))))
        elif what == "join asked":
            self.take(events.JoinAsked(self.at, self.pick("bcde"), tuple(self.pick(["", "", self.host()]))))
        elif what == "listed" and state.is_elastic:
            listed = self.pick(["abcd", "abc", "abcde", "acd", "a", None])
            if listed is not None and state.outside.known is not None:
                self.dropped = (self.dropped | state.outside.known) - set(listed)
            self.take(events.Listed(self.at, None if listed is None else tuple(listed)))

    def copy(self) -> None:
        """The ranks make steps, and copy their state. With `saves_for` they make none."""
        self.may_start = False
        if not self.state.saves_for:
            self.is_copied = self.has_checkpoint = self.has_stepped = True
            self.wait_ends = 0.0
            self.step += 2
            self.holders = set(names(self.state.now_on))
        if self.limits.most_restarts:
            self.take(events.RanksSaid(self.at, 1))

    def fail(self, host: str | None = None, gone: tuple[str, ...] = ()) -> None:
        step = self.step + self.pick([1, 0]) if self.is_copied else None
        step = step or None
        self.holders -= set(gone)
        cause = f"{' and '.join(gone)} fell silent" if gone else f"rank 1 on {host} was killed by signal 9"
        failure = FailedAttempt(cause, 137, self.at, self.first + 1 if step else None, step, host, gone, self.at)
        self.take(events.Failed(self.at, failure, self.is_copied), gone=gone)

    def not_started(self, gone: tuple[str, ...], different: dict[str, str]) -> None:
        bad = set(gone)
        if self.state.is_elastic and "a" not in different:
            bad |= set(different)
        if self.state.joining is None:  # else it goes back to hosts that may still have the state
            self.holders -= bad
        self.take(events.NotStarted(self.at, "no answer", gone, different), gone=tuple(sorted(bad)))

    def leave(self) -> None:
        if not self.state.saves_for:
            self.copy()
        if self.is_over or not (self.has_left or self.state.saves_for):
            return
        told = (0,) if self.pick([False, True]) else ()
        self.is_ready &= self.pick([True, True, False])  # the next attempt may just have failed
        self.take(events.Left(self.at, self.step, self.at, told, self.is_ready and self.prepared is not None))

    def take(self, event: Event, gone: tuple[str, ...] = ()) -> None:
        """The policy takes in an event, and all that must hold is compared."""
        self.story.append(event)
        before = self.state
        self.state, actions = policy.next(before, event)
        self.story.append(actions)
        ends_attempt = isinstance(
            event, events.Done | events.Interrupted | events.Failed | events.Left | events.NotStarted
        )
        if ends_attempt:
            assert self.is_running or before.waiting is not None
            self.is_running = False
        says = " ".join(action.text for action in actions if isinstance(action, events.Say))
        follows = [action for action in actions if isinstance(action, events.Start | events.End | events.Wait)]
        is_over = ends_attempt or (before.waiting is not None and self.state.waiting is None)
        assert len(follows) == (is_over or isinstance(event, events.JobBegun)), "one thing follows an attempt"
        if isinstance(event, events.Fit) and before.waiting is not None and before.hosts is not self.state.hosts:
            self.there |= set(event.wider.hosts) - set(event.find.now_on.hosts)
        if not isinstance(event, events.JobBegun):
            self.note_bad(before, event, gone)
        for action in actions:
            match action:
                case events.Prepare(where=where):
                    assert self.is_running
                    assert self.prepared is None, "two attempts are prepared"
                    self.prepared, self.is_ready = names(where), False
                case events.Drop():
                    self.prepared, self.is_ready = None, False
                case events.Tell(command=command):
                    assert (command == STAYS) == (self.state.change is None)
                    assert command != LEAVES or (self.state.change and not self.state.change.is_end)
                    assert command != SAVES or (self.state.change and self.state.change.is_end)
                    self.command = command
                    self.has_left |= command in (LEAVES, SAVES)
                case events.Wait():
                    self.wait(before, event, gone)
                case events.Start():
                    self.start(before, event, action, gone)
                case events.End():
                    self.end(before, event, action, says, gone, [type(one) for one in actions])
                case events.Find():
                    self.find(action)
                case events.AskHosts(hosts=hosts):
                    self.ask(hosts)
        waiting = self.state.waiting
        if waiting is not None:
            assert waiting.until == self.wait_ends, "it waits too long"
            assert not isinstance(event, events.Waited) or self.at < waiting.until, "it waits too long"
        asked = isinstance(event, events.LeaveAsked | events.JoinAsked | events.StopAsked)
        answers = [action for action in actions if isinstance(action, events.Reply | events.Find)]
        assert len(answers) == 1 or not asked, "who asks hears something"
        if before.waiting is not None:
            pass
        elif [action for action in answers if isinstance(action, events.Reply) and action.is_accepted]:
            assert self.command == PREPARES
            assert self.state.change is not None
        self.changes_as_it_may(before, event)

    def changes_as_it_may(self, before: events.JobState, event: Event) -> None:
        """A change begins only where the ranks can leave, and ends with their run."""
        change = self.state.change
        assert change is None or self.state.run == 1, "a run is left that is over"
        if change is not None and change is not before.change:
            assert self.is_running
            assert before.change is None or isinstance(event, events.RanksSaid), "two changes"
            assert not before.saves_for, "the hosts change in an attempt that only saves"
            assert not isinstance(event, events.RanksSaid) or not event.is_ending, "mpiexec has sent that signal"
            assert not isinstance(event, events.Fit) or event.find.attempt == before.attempt, "of another attempt"

    def note_bad(self, before: events.JobState, event: Event, gone: tuple[str, ...]) -> None:
        """Keep what the policy should know of hosts."""
        if isinstance(event, events.Failed):
            is_start_with_joined = before.joining is not None and event.failure.step is None
            if not is_start_with_joined or before.saves_for:
                self.failures.append(event.failure)
                self.away += [(self.at, host) for host in gone]
        elif isinstance(event, events.NotStarted) and before.joining is None:
            self.away += [(self.at, host) for host in gone]
        known = set(self.away)
        self.away += [one for one in self.state.absent if one not in known]  # who did not join
        for one in set(self.away) - set(known):
            assert isinstance(event, events.Failed | events.NotStarted | events.NotPrepared), one

    def wait(self, before: events.JobState, event: Event, gone: tuple[str, ...]) -> None:
        """Too few hosts are left, and the job waits for those that were lost."""
        assert isinstance(event, events.Failed | events.NotStarted)
        self.count(event)
        self.there = (set(names(before.now_on)) & set(names(self.state.hosts))) - set(gone)
        assert len(self.there) < max(1, self.limits.min_nodes) <= len(self.state.hosts.hosts)
        self.wait_ends = self.wait_ends or self.at + WAIT_SECONDS
        assert self.at < self.wait_ends, "it waits once more"

    def count(self, failed: Event) -> None:
        """After a failure, another attempt will follow."""
        if not isinstance(failed, events.Failed):
            return
        self.num_restarts += 1
        assert self.num_restarts <= self.limits.most_restarts, "too many restarts"
        assert self.limits.restarts is not None or self.has_checkpoint
        same = [failure for failure in self.failures if failure.step == failed.failure.step]
        assert len(same) < 3, "three times at a step"

    def start(self, before: events.JobState, event: Event, start: events.Start, gone: tuple[str, ...]) -> None:
        where, limits = names(self.state.now_on), self.limits
        assert not self.is_running, "two attempts at once"
        assert self.prepared == (where if start.takes_over else None), "another attempt is there"
        assert not start.takes_over or self.is_ready
        self.prepared, self.is_ready = None, False
        only_saves = start.pause is not None and start.pause.only_saves
        assert only_saves == (len(where) < limits.min_nodes), "too few hosts"
        assert len(where) <= (limits.max_nodes or 9)
        if only_saves:
            assert self.has_stepped
        if self.has_stepped:
            assert start.pause is not None, "it begins anew"
            assert start.pause.step is None or start.pause.step <= self.step + 1, "a step is skipped"
        old_holders = self.holders
        holds = self.holders & set(where)
        assert holds or not self.holders, "the state is lost"
        self.holders = holds
        is_early = isinstance(event, events.NotStarted) or (isinstance(event, events.Failed) and not event.failure.step)
        goes_back = before.joining is not None and is_early
        if not goes_back:
            self.count(event)
        if before.waiting is not None:
            assert set(where) <= self.there, "a host is used that has not answered"
            assert not set(where) & self.dropped or not old_holders & (self.there - self.dropped), "it was to leave"
        elif isinstance(event, events.Left):
            assert before.change is None or set(where) == set(names(before.change.now_on))
        elif goes_back:
            assert before.joining is not None
            joined = set(before.joining.joined)
            blamed = joined & set(gone) if gone else joined
            assert {(self.at, host) for host in blamed} <= set(self.state.absent), "nobody is blamed"
        else:
            self.only_by_the_rules(set(where), set(names(before.now_on)) - set(gone), is_first=before.attempt == 0)
        self.is_running = self.may_start = True
        self.command, self.has_left = STAYS, False
        self.first, self.is_copied = self.step, False

    def only_by_the_rules(self, where: set[str], present: set[str], *, is_first: bool) -> None:
        """A host that was bad is set aside, each time for longer; an elastic job asks it before it is used."""
        suspects = [(b.when, b.host) for a, b in pairwise(self.failures) if b.host and a.host == b.host]
        present = set() if is_first else present

        def is_aside(host: str, bad: list[tuple[float, str]]) -> bool:
            times = [when for when, bad_host in bad if bad_host == host]
            return bool(times) and self.at < max(times) + min(60 * 2 ** (len(times) - 1), 3600)

        hosts = set(names(self.state.hosts))
        gone = {host for when, host in self.away if self.at < when + 60} - present
        aside = {host for host in hosts if is_aside(host, self.away)} - present
        aside |= {host for host in hosts if is_aside(host, suspects)}
        if self.limits.max_nodes is not None:
            aside |= {host for _, host in self.away} - present
        good = hosts - gone - aside
        assert not where & gone, "a host is back too soon"
        if len(good) >= max(1, self.limits.min_nodes):
            extra = where - good
            assert len(extra) <= 1, "a host that is set aside is used"
            assert not extra or where & self.holders == extra
        assert where <= hosts

    def end(
        self,
        before: events.JobState,
        event: Event,
        end: events.End,
        says: str,
        gone: tuple[str, ...],
        kinds: list[type[events.Action]],
    ) -> None:
        assert not self.is_running
        assert self.prepared is None, "an attempt is left"
        self.is_over = True
        if end.code == 0:
            assert isinstance(event, events.Done), "the work is not done"
        if isinstance(event, events.Done):
            assert end.code == event.code
            return
        text = f"{end.reason} {says}"
        match event:
            case events.Failed(failure=failure):
                assert failure.cause in end.reason, "no culprit"
                assert end.code == failure.code or before.saves_for
                silent = self.limits.most_restarts == 0 or (self.limits.restarts is None and not self.has_checkpoint)
                assert failure.cause in says or silent
            case events.NotStarted():
                why = [event.problem, *event.different.values()]
                assert any(problem in text for problem in why), "no culprit"
                assert events.LeaveState in kinds or not end.is_error or not self.holders, "the state is not left"
            case events.Left():
                assert before.saves_for or (before.change and before.change.is_end), "the ranks have left for nothing"
                assert "step" in says
            case _:
                assert end.reason, "no reason"
        is_saved = isinstance(event, events.Left) or events.LeaveState in kinds
        hosts = set(names(self.state.hosts))
        away = {host for when, host in self.away if self.at < when + 60}
        may_go_on = self.num_restarts < self.limits.most_restarts and not isinstance(event, events.Interrupted)
        if may_go_on and self.has_stepped and self.holders & hosts - away and len(hosts - away) < self.limits.min_nodes:
            same = (
                [failure for failure in self.failures if failure.step == self.failures[-1].step]
                if self.failures
                else []
            )
            assert is_saved or len(same) >= 3 or isinstance(event, events.JobBegun), "the state is not saved"
        if before.saves_for and not isinstance(event, events.Left | events.Interrupted):
            assert is_saved or not self.holders & hosts - away, "the state is not saved"

    def find(self, find: events.Find) -> None:
        """The hosts that would join are looked at, which takes time."""
        wider = widen(find.now_on, find.text)
        if set(find.text.split(",")) & set(names(find.now_on)):  # as widened() does
            return
        if self.pick([False, False, True]):
            self.at += self.pick(_NAPS)
            is_waiting = self.state.waiting is not None
            self.happen(self.pick(_WAITS if is_waiting else ["copy", "killed", "second run", "copy"]))
        if self.is_over:
            return
        joined = find.text.split(",")
        if self.pick([True, True, False]):
            everyone = widen(find.hosts.without(set(joined)), find.text)
            self.take(events.Fit(self.at, find, wider, everyone))
            return
        away = tuple(self.pick(["", joined[0]]))
        different = {joined[-1]: "numpy 2"} if self.pick([False, True]) else {}
        self.take(events.Unfit(self.at, find, "they differ", away, different))

    def ask(self, hosts: tuple[str, ...]) -> None:
        """An elastic job asks only hosts that it could use."""
        suspects = [(b.when, b.host) for a, b in pairwise(self.failures) if b.host and a.host == b.host]
        for host in hosts:
            assert host not in self.dropped, "a host is asked that is not in the inventory"
            if self.state.waiting is not None:
                assert host not in self.there
                assert all(self.at >= when + 60 for when, bad in self.away if bad == host), "it is asked too soon"
                continue
            assert host not in names(self.state.now_on)
            times = [when for when, bad in [*self.away, *suspects] if bad == host]
            assert len(times) < 3, "a host is asked once too often"
            assert not times or self.at >= max(times) + min(60 * 2 ** (len(times) - 1), 3600), "it is asked too soon"
        inside = frozenset(host for host in hosts if self.pick([True, False]))
        self.there |= inside & set(names(self.state.hosts))
        self.take(events.Answered(self.at, hosts, inside))


# What may happen while the attempt begins, trains, saves, while the next one is prepared, and when the ranks may leave.
_FAILS = "killed", "lost", "told", "second run"
_BEGINS = "copy", "copy", "copy", "not started", "not started", *_FAILS
_TRAINS = (
    "copy",
    "ready",
    "leave asked",
    "join asked",
    "join asked",
    "listed",
    "listed",
    "goes well",
    "interrupted",
    *_FAILS,
)
_SAVES = "left", "copy", "leave asked", "not started", *_FAILS
_PREPARES = "ready", "ready", "ready", "not prepared", "copy", "join asked", "goes well", *_FAILS
_WAITS = "waited", "waited", "waited", "goes well", "stop asked", "join asked", "leave asked", "listed", "interrupted"
_LEAVES = "left", "left", "left", "not prepared", "copy", *_FAILS
