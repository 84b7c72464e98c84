"""Starts a job again after a failure or a change of its hosts: where, and when a new start is useless.

    start ─> code 0: done
      ^  └─> failure ─> judge ─┬─> hosts: start again there; the script goes on from memory, or its newest checkpoint
      └──────────────────────<─┘
                               └─> none: say why, and end with the code of the last failure

A host that fell silent or does not answer is set aside, each time for longer. A host that answers stays, unless one of
its ranks was the first to fail twice in a row. Then this host is set aside too, if that leaves `min_nodes`.

If hosts leave or join as somebody wished (changes.py), all ranks have ended after the same step. That is no failure.

An elastic job also starts without the hosts that cannot take part, and takes them in later (intake.py). If too few
hosts are left after a failure, it starts once more on these, only to save its state.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpitrain.errors import LaunchError
from mpitrain.launch.change import Change
from mpitrain.launch.changes import Changes
from mpitrain.launch.ending import Ended, last_step, why
from mpitrain.launch.intake import Intake
from mpitrain.launch.placement import Placement
from mpitrain.launch.successor import Successor
from mpitrain.launch.verdict import FailedTry, Limits, judge


@dataclass(frozen=True)
class Pause:
    """Why training stands still when a try begins.

    Attributes:
        cause: in a line.
        step: the first step that is missing; None: all are.
        since: when it stopped, by time.monotonic().
    """

    cause: str
    step: int | None
    since: float


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

    The code is 0 only if the last try did its work; else it is that of the last failure.

    Args:
        run: runs the job on a placement to its end, and leaves nothing of the try behind. It gets what ended the try
            before, if there was one.
        placement: where the job may run.
        limits: what the user allows.
        changes: the wishes to change the hosts; None: nobody can wish.
        intake: takes hosts in, for an elastic job; else None.
        pause: what ended the last try of another launcher, with whose job this one goes on; None: there is none.
        silent: the hosts that do not answer now.

    Raises:
        LaunchError: a try could not be started, even without the hosts that are set aside.
    """
    failures: list[FailedTry] = []
    absent = changes.bad if changes is not None else []
    hosts, now_on = placement, placement.first(limits.max_nodes)
    joining: Change | None = None  # until its first step
    next_try: Successor | None = None  # that is ready
    has_trained = pause is not None
    saves_for = ""  # why the try is there only to save
    before = hosts, now_on  # that change
    if silent:
        absent += [(time.monotonic(), host) for host in silent]
        verdict = judge(hosts.hosts, failures, absent, limits, time.monotonic(), has_trained=has_trained)
        if not verdict.hosts:
            _say(f"the job does not go on: {verdict.reason}")
            return 1
        now_on = hosts.without(set(hosts.hosts) - set(verdict.hosts))
        _say(f"starting again on {_follows(now_on, hosts)}")
    while True:
        if changes is not None:
            changes.begin(hosts, now_on, saves_for)
        if intake is not None:
            intake.begin(hosts, now_on, failures)
        try:
            if changes is not None and next_try is not None:
                ended = next_try.to_end(changes.look)
            else:
                ended = run(now_on, pause)
        except LaunchError as error:
            next_try, saves_for = None, ""
            change = changes.take() if changes is not None else None
            away, account = [host for host in error.hosts if host in hosts.hosts], str(error)
            if intake is not None and error.different and hosts.own not in error.different:
                different = {host: text for host, text in error.different.items() if host not in away}
                intake.note(different, time.monotonic())
                away += different
                account = "; ".join(f"{host} cannot take part: {text}" for host, text in error.different.items())
            if joining is not None:
                absent += [(time.monotonic(), host) for host in joining.joined if host in away or not away]
                _say(f"the job goes on as before, without {', '.join(joining.joined)}: {account}")
                (hosts, now_on), joining = _back(before, hosts, intake), None
                continue
            if not away or (pause is None and intake is None):
                raise
            absent += [(time.monotonic(), host) for host in away]
        else:
            change = next_try = None
            if changes is not None:
                change = changes.take(has_left=ended.left is not None)
                next_try = changes.take_next(change if ended.left is not None else None)
            if ended.is_interrupted or limits.restarts == 0:
                return ended.code
            number = f"try {len(failures) + 1} of {limits.restarts + 1}"
            if change is not None and ended.left is not None:
                step, since = ended.left
                if change.is_end:
                    _say(f"{change.text}: the job has ended after step {step}")
                    return _code(failures) if saves_for else 128 + signal.SIGTERM
                before, (hosts, now_on) = (hosts, now_on), (change.hosts, change.now_on)
                joining = change if change.joined else None
                has_trained = True
                pause = Pause(change.text, step + 1, since)
                _say(f"{change.text} after step {step}; going on on {_where(now_on)}")
                continue
            if ended.left is not None:  # for a change that was dropped at that moment
                pause = Pause("the ranks had left", ended.left[0] + 1, ended.left[1])
                _say(f"the ranks had left after step {ended.left[0]}; starting again on {_where(now_on)}")
                continue
            if ended.code == 0:
                if change is not None:
                    _say(f"the job ended before its hosts could change: {change.text}")
                if failures:
                    _say(f"{number} succeeded")
                return 0
            failure = _failure(ended, now_on)
            if joining is not None and failure.step is None:
                _say(f"with {', '.join(joining.joined)}, the job failed before its first step: {failure.cause}")
                blamed = [host for host in joining.joined if host in failure.lost or not failure.lost]
                absent += [(failure.when, host) for host in blamed]
                (hosts, now_on), joining = _back(before, hosts, intake), None
                _say(f"going on as before, on {_where(now_on)}")
                continue
            failures.append(failure)
            away = list(failure.lost)
            has_trained = has_trained or failure.step is not None
            pause = Pause(failure.cause, failure.step, failure.failed_at)
            account = f"{number}{_account(failure)}"
        joining = None
        if change is not None:
            hosts = change.hosts
        if intake is not None:
            hosts = hosts.without(intake.dropped)
        now, present = time.monotonic(), set(now_on.hosts) - set(away)
        verdict = judge(hosts.hosts, failures, absent, limits, now, has_trained=has_trained, present=present)
        again = " again" if pause is not None else ""
        if verdict.hosts:
            saves_for = ""
            now_on = hosts.without(set(hosts.hosts) - set(verdict.hosts))
            _tell(account, f"starting{again} on {_follows(now_on, hosts)}")
        elif intake is not None and verdict.left and has_trained and not saves_for:
            saves_for = verdict.reason
            now_on = hosts.without(set(hosts.hosts) - set(verdict.left))
            _tell(account, f"{saves_for}. Starting again on {', '.join(verdict.left)} only to save the state")
        else:
            _tell(account, f"not started{again}: {verdict.reason}")
            return _code(failures)


def _code(failures: Sequence[FailedTry]) -> int:
    return failures[-1].code if failures else 1


def _back(before: tuple[Placement, Placement], hosts: Placement, intake: Intake | None) -> tuple[Placement, Placement]:
    """All hosts, and where the job goes on, if hosts could not join. An elastic job takes them in later."""
    return before[0] if intake is None else hosts, before[1]


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
    """Describe how a try went, after its number."""
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
        _say(text)


def _say(text: str) -> None:
    print(f"mpitrain: {text}", file=sys.stderr, flush=True)
