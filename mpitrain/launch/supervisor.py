"""Starts a job again after a failure or a change of its hosts: where, and when a new start is useless.

    start ─> code 0: done
      ^  └─> failure ─> judge ─┬─> hosts: start again there; the script continues from memory, or its newest checkpoint
      └──────────────────────<─┘
                               └─> none: say why, and end with the code of the last failure

A host that fell silent or does not answer is set aside, each time for longer. A host that answers stays, unless one of
its ranks was the first to fail twice in a row. Then this host is set aside too, if that leaves `min_nodes`.

If hosts leave or join as somebody wished (changes.py), all ranks have ended after the same step. That is no failure.

An elastic job also starts without the hosts that cannot take part, and takes them in later (intake.py).

If too few hosts are left after a failure, the job starts once more on these, only to save its state. No step is made:
another part of a broken network may still make the next one, and what is saved must not be ahead of it. If nothing can
be saved, the keepers keep the state for another launcher.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from mpitrain.errors import LaunchError
from mpitrain.launch.changes import Changes
from mpitrain.launch.ending import Ended, last_step, why
from mpitrain.launch.intake import Intake
from mpitrain.launch.log import say
from mpitrain.launch.placement import Placement
from mpitrain.launch.policy import Change, FailedTry, Limits, Verdict, judge
from mpitrain.launch.successor import Successor


@dataclass(frozen=True)
class Pause:
    """Why training stands still when an attempt begins.

    Attributes:
        cause: in a line.
        step: the first step that is missing; None: all are.
        since: when it stopped, by time.monotonic().
        only_saves: the try makes no step; it only saves.
    """

    cause: str
    step: int | None
    since: float
    only_saves: bool = False


def supervise(
    run: Callable[[Placement, Pause | None], Ended],
    placement: Placement,
    limits: Limits,
    changes: Changes | None = None,
    intake: Intake | None = None,
    pause: Pause | None = None,
    silent: Sequence[str] = (),
) -> int:
    """Run a job, and again after failures as far as `limits` allow. Return the exit code.

    The code is 0 only if the last attempt did its work; else it is that of the last failure.

    Args:
        run: runs the job on a placement to its end, and leaves nothing of the try behind. It gets what ended the try
            before, if there was one.
        placement: where the job may run.
        limits: what the user allows.
        changes: the wishes to change the hosts; None: nobody can wish.
        intake: takes hosts in, for an elastic job; else None.
        pause: what ended the last attempt of another launcher, with whose job this one continues; None: there is none.
        silent: the hosts that do not answer now.

    Raises:
        LaunchError: an attempt could not be started, even without the hosts that are set aside.
    """
    return _Supervision(run, placement, limits, changes, intake, pause).to_end(silent)


class _Supervision:
    """What is known of a job and its hosts from try to try.

    Attributes:
        hosts: all hosts of the job, with those that are set aside.
        now_on: where the next attempt runs.
        pause: what ended the attempt before; None: there was no attempt from which the next one continues.
        failures: of the attempts so far.
        absent: the hosts that did not answer, each with the time.
        has_trained: an attempt before made steps.
        has_checkpoint: an attempt before has taken a checkpoint, or resumed from one.
        saves_for: why the next attempt is there only to save; "": it trains.
    """

    def __init__(
        self,
        run: Callable[[Placement, Pause | None], Ended],
        placement: Placement,
        limits: Limits,
        changes: Changes | None,
        intake: Intake | None,
        pause: Pause | None,
    ) -> None:
        """For the arguments see supervise."""
        self.hosts, self.now_on = placement, placement.first(limits.max_nodes)
        self.pause = pause
        self.failures: list[FailedTry] = []
        self.absent = changes.bad if changes is not None else []
        self.has_trained = self.has_checkpoint = pause is not None
        self.saves_for = ""
        self._run = run
        self._limits = limits
        self._changes = changes
        self._intake = intake
        self._joining: Change | None = None  # until its first step
        self._before = self.hosts, self.now_on  # before that change
        self._next_try: Successor | None = None  # that is ready

    def to_end(self, silent: Sequence[str]) -> int:
        """Make attempts until none follows. Return the exit code. These hosts do not answer now."""
        if silent:
            self.absent += [(time.monotonic(), host) for host in silent]
            verdict = self._judge(set())
            if not verdict.hosts:
                say(f"the job does not continue: {verdict.reason}")
                return 1
            self.now_on = self._only(verdict.hosts)
            say(f"starting again on {_follows(self.now_on, self.hosts)}")
        while True:
            code = self._make_try()
            if code is not None:
                return code

    def _make_try(self) -> int | None:
        """Make an attempt, and choose where the next one runs. Return the exit code if none follows."""
        if self._changes is not None:
            self._changes.begin(self.hosts, self.now_on, self.saves_for)
        if self._intake is not None:
            self._intake.begin(self.hosts, self.now_on, self.failures)
        try:
            if self._changes is not None and self._next_try is not None:
                ended = self._next_try.to_end(self._changes.look)
            else:
                pause = self.pause and replace(self.pause, only_saves=bool(self.saves_for))
                ended = self._run(self.now_on, pause)
        except LaunchError as error:
            return self._could_not_start(error)
        self.has_checkpoint |= any(record.has_checkpoint for record in ended.records.values())
        change = self._next_try = None
        if self._changes is not None:
            change = self._changes.take(has_left=ended.left is not None)
            self._next_try = self._changes.take_next(change if ended.left is not None else None)
        if ended.is_interrupted or self._limits.most_restarts == 0:
            return ended.code
        if ended.left is not None:
            return self._left(change, *ended.left)
        if ended.code == 0:
            if change is not None:
                say(f"the job ended before its hosts could change: {change.text}")
            if self.failures:
                say(f"{self._number} succeeded")
            return 0
        if self._limits.restarts is None and not self.has_checkpoint:
            return ended.code
        return self._failed(_failure(ended, self.now_on), change)

    def _could_not_start(self, error: LaunchError) -> int | None:
        """Continue without the hosts that cannot take part; else raise the error."""
        self._next_try = None
        saves_for, self.saves_for = self.saves_for, ""
        change = self._changes.take() if self._changes is not None else None
        away, account = [host for host in error.hosts if host in self.hosts.hosts], str(error)
        if self._intake is not None and error.different and self.hosts.own not in error.different:
            different = {host: text for host, text in error.different.items() if host not in away}
            self._intake.note(different, time.monotonic())
            away += different
            account = "; ".join(f"{host} cannot take part: {text}" for host, text in error.different.items())
        if self._joining is not None:
            joined = self._joining.joined
            self.absent += [(time.monotonic(), host) for host in joined if host in away or not away]
            say(f"the job continues as before, without {', '.join(joined)}: {account}")
            self._go_back()
            return None
        if not away and saves_for:
            self.saves_for = saves_for
            return self._not_saved(account)
        if not away or (self.pause is None and self._intake is None):
            raise error
        self.absent += [(time.monotonic(), host) for host in away]
        return self._start_again(account, away, change)

    def _left(self, change: Change | None, step: int, since: float) -> int | None:
        """All ranks have ended after this step, at this time, so that the hosts can change, or because it is saved."""
        if self.saves_for:
            say(f"{self.saves_for}: the job has ended after step {step}, which is saved")
            return _code(self.failures)
        if change is None:  # it was dropped at that moment
            self.pause = Pause("the ranks had left", step + 1, since)
            say(f"the ranks had left after step {step}; starting again on {_where(self.now_on)}")
            return None
        if change.is_end:
            say(f"{change.text}: the job has ended after step {step}")
            return 128 + signal.SIGTERM
        self._before = self.hosts, self.now_on
        self.hosts, self.now_on = change.hosts, change.now_on
        self._joining = change if change.joined else None
        self.has_trained = True
        self.pause = Pause(change.text, step + 1, since)
        say(f"{change.text} after step {step}; continuing on {_where(self.now_on)}")
        return None

    def _failed(self, failure: FailedTry, change: Change | None) -> int | None:
        if self.saves_for:
            return self._not_saved(failure.cause)
        if self._joining is not None and failure.step is None:
            joined = self._joining.joined
            say(f"with {', '.join(joined)}, the job failed before its first step: {failure.cause}")
            # Whoever is to blame: they are set aside, or an elastic job would take them in again at once.
            self.absent += [(failure.when, host) for host in joined if host in failure.lost or not failure.lost]
            self._go_back()
            say(f"continuing as before, on {_where(self.now_on)}")
            return None
        account = f"{self._number}{_account(failure)}"
        self.failures.append(failure)
        self.has_trained = self.has_trained or failure.step is not None
        self.pause = Pause(failure.cause, failure.step, failure.failed_at)
        return self._start_again(account, failure.lost, change)

    def _not_saved(self, cause: str) -> int:
        """Leave the state to the keepers. Return the exit code."""
        say(f"{self.saves_for}; the state was not saved: {cause}")
        kept = self._changes.leave_state(self.saves_for) if self._changes is not None else ""
        say(kept or "no host has the state in memory; the same command continues from the newest checkpoint, if any")
        return _code(self.failures)

    def _go_back(self) -> None:
        """Continue where the job was before hosts joined. An elastic job takes them in later."""
        hosts, self.now_on = self._before
        if self._intake is None:
            self.hosts = hosts
        self._joining = None

    def _start_again(self, account: str, away: Sequence[str], change: Change | None) -> int | None:
        """Choose where to start after a failure, without the hosts that are away, and say so after the account."""
        self._joining = None
        if change is not None:
            self.hosts = change.hosts
        if self._intake is not None:
            self.hosts = self.hosts.without(self._intake.dropped)
        verdict = self._judge(set(self.now_on.hosts) - set(away))
        again = " again" if self.pause is not None else ""
        if verdict.hosts:
            self.saves_for = ""
            self.now_on = self._only(verdict.hosts)
            _tell(account, f"starting{again} on {_follows(self.now_on, self.hosts)}")
        elif verdict.left and self.has_trained and not self.saves_for:
            self.saves_for = verdict.reason
            self.now_on = self._only(verdict.left)
            _tell(account, f"{self.saves_for}. Starting again on {', '.join(verdict.left)} only to save the state")
        else:
            _tell(account, f"not started{again}: {verdict.reason}")
            return _code(self.failures)
        return None

    def _judge(self, present: Set[str]) -> Verdict:
        return judge(
            self.hosts.hosts,
            self.failures,
            self.absent,
            self._limits,
            time.monotonic(),
            has_trained=self.has_trained,
            present=present,
        )

    def _only(self, hosts: Sequence[str]) -> Placement:
        return self.hosts.without(set(self.hosts.hosts) - set(hosts))

    @property
    def _number(self) -> str:
        return f"attempt {len(self.failures) + 1} of {self._limits.most_restarts + 1}"


def _code(failures: Sequence[FailedTry]) -> int:
    return failures[-1].code if failures else 1


def _where(placement: Placement) -> str:
    return f"{', '.join(placement.hosts)} with {placement.num_ranks} ranks"


def _failure(ended: Ended, placement: Placement) -> FailedTry:
    cause, rank = why(ended, placement.host_of)
    first = min((record.first_step for record in ended.records.values() if record.step), default=None)
    host = None if rank is None else placement.host_of(rank)
    now, step = time.monotonic(), last_step(ended.records, rank)
    failed_at = ended.first_end.seconds if ended.first_end else now
    return FailedTry(cause, ended.code, now, first, step, host, ended.lost, failed_at)


def _account(failure: FailedTry) -> str:
    """Describe how an attempt went, after its number."""
    begun = f", from step {failure.first - 1}," if failure.first and failure.first > 1 else ""
    at = f"at step {failure.step}" if failure.step else "before its first step"
    return f"{begun} failed {at}: {failure.cause}"


def _follows(now_on: Placement, placement: Placement) -> str:
    aside = [host for host in placement.hosts if host not in now_on.hosts]
    less = f" with {now_on.num_ranks} ranks, without {', '.join(aside)}" if aside else ""
    return f"{', '.join(now_on.hosts)}{less}"


def _tell(account: str, follows: str) -> None:
    """Say what happened and what follows, in one line if the first is one."""
    for text in [account, follows] if "\n" in account else [f"{account}; {follows}"]:
        say(text)
