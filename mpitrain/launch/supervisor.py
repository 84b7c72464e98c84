"""Starts a job again after a failure or a change of its hosts: where, and when a new start is useless.

    start ─> code 0: done
      ^  └─> failure ─> judge ─┬─> hosts: start again there; the script goes on from memory, or its newest checkpoint
      └──────────────────────<─┘
                               └─> none: say why, and end with the code of the last failure

A host that fell silent or does not answer is set aside, each time for longer. A host that answers stays, unless one of
its ranks was the first to fail twice in a row. Then this host is set aside too, if that leaves `min_nodes`.

If hosts leave or join as somebody wished (changes.py), all ranks have ended after the same step. That is no failure.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mpitrain.errors import LaunchError
from mpitrain.launch.changes import Change, Changes
from mpitrain.launch.ending import Ended, is_kill, last_step, why
from mpitrain.launch.placement import Placement
from mpitrain.launch.successor import Successor

# A guard that was cut off ends the job's part on its host within 30 s; no host returns before that.
ASIDE_SECONDS = 60.0  # the first time; the time doubles each time after that
MOST_ASIDE_SECONDS = 3600.0
# The third failure in the same step is no accident.
_MOST_AT_A_STEP = 3


@dataclass(frozen=True)
class Limits:
    """How often a job may be started again, and on how few hosts."""

    restarts: int = 0
    min_nodes: int = 1


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


@dataclass(frozen=True)
class FailedTry:
    """A try that failed.

    Attributes:
        cause: the cause in a line.
        code: its exit code.
        when: the time of its end, in seconds, by any clock that does not go back.
        failed_at: the time of the first end of a rank, by the same clock, if known; else of the end of the try.
        first: the first step that it began; None: it began none.
        step: the step in which it failed; None: before its first.
        host: the host of the rank that failed first, if known.
        lost: the hosts that fell silent.
    """

    cause: str
    code: int
    when: float
    first: int | None = None
    step: int | None = None
    host: str | None = None
    lost: tuple[str, ...] = ()
    failed_at: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What to do after a failure: start again on `hosts`, or, if `hosts` is empty, end because of `reason`."""

    hosts: tuple[str, ...] = ()
    reason: str = ""


def judge(
    hosts: Sequence[str],
    failures: Sequence[FailedTry],
    absent: Sequence[tuple[float, str]],
    limits: Limits,
    now: float,
    *,
    has_trained: bool = False,
) -> Verdict:
    """Decide whether to start again, and where.

    Args:
        hosts: the hosts that the user named, in order.
        failures: all failed tries so far; none if only hosts were absent after a change.
        absent: the hosts that did not answer when a try was about to start, each with the time.
        limits: what the user allows.
        now: the present time, by the clock of the failures.
        has_trained: a try before made steps, and its hosts changed.
    """
    last = failures[-1] if failures else FailedTry("", 1, now)
    if len(failures) == 1 and last.step is None and not last.lost and not has_trained:
        return Verdict(reason="it failed before its first step, and would fail again")
    same = [failure for failure in failures if failure.step == last.step]
    if len(same) >= _MOST_AT_A_STEP:
        return Verdict(reason=_diagnosis(same, len(hosts)))
    if len(failures) > limits.restarts:
        return Verdict(reason="no try is left")
    bad = [(failure.when, host) for failure in failures for host in failure.lost] + list(absent)
    gone = _set_aside(bad, now)
    suspect = _set_aside([(b.when, b.host) for a, b in pairwise(failures) if b.host and a.host == b.host], now)
    there = [host for host in hosts if host not in gone]
    if len(there) < limits.min_nodes or not there:
        problem = f"only {', '.join(there)} of {', '.join(hosts)} can take part" if there else "no host can take part"
        return Verdict(reason=f"{problem}, and --min-nodes is {limits.min_nodes}")
    best = [host for host in there if host not in suspect]
    return Verdict(tuple(best if len(best) >= limits.min_nodes and best else there))


def _set_aside(bad: Sequence[tuple[float, str]], now: float) -> set[str]:
    """Return the hosts that are set aside now, from the times at which each was found bad."""
    aside = set()
    for host in {host for _, host in bad}:
        times = [when for when, bad_host in bad if bad_host == host]
        if now < max(times) + min(ASIDE_SECONDS * 2 ** (len(times) - 1), MOST_ASIDE_SECONDS):
            aside.add(host)
    return aside


def _diagnosis(same: Sequence[FailedTry], num_hosts: int) -> str:
    """Say what the tries that failed at the same step have in common."""
    step = same[-1].step
    parts = [f"{len(same)} tries failed {f'at step {step}' if step else 'before their first step'}"]
    known = sorted({failure.host for failure in same if failure.host})
    if len(known) > 1:
        parts.append(f"on {', '.join(known)}, so no single machine is to blame: examine program and data of this step")
    elif known and num_hosts > 1 and all(failure.host for failure in same):
        parts.append(f"always on {known[0]}: try without this host, or examine what its ranks do in this step")
    else:
        parts.append("examine program and data of this step")
    if all(is_kill(failure.cause) for failure in same):
        parts.append("if nobody sent signal 9, the kernel did, because memory ran out: `sudo dmesg | grep -i oom`")
    if step and step > 1 and all(failure.first == 1 for failure in same):
        parts.append("every try began at step 1: no checkpoint was found; the hook mt.Checkpoint writes checkpoints")
    return "; ".join(parts)


def supervise(
    run: Callable[[Placement, Pause | None], Ended],
    placement: Placement,
    limits: Limits,
    changes: Changes | None = None,
    pause: Pause | None = None,
    away: Sequence[str] = (),
) -> int:
    """Run a job, and again after failures as far as `limits` allow. Return the exit code.

    The code is 0 only if the last try did its work; else it is that of the last failure.

    Args:
        run: runs the job on a placement to its end, and leaves nothing of the try behind. It gets what ended the try
            before, if there was one.
        placement: where the job runs first.
        limits: what the user allows.
        changes: the wishes to change the hosts; None: nobody can wish.
        pause: what ended the last try of another launcher, with whose job this one goes on; None: there is none.
        away: the hosts that do not answer now.

    Raises:
        LaunchError: a try could not be started, even without the hosts that are set aside.
    """
    failures: list[FailedTry] = []
    absent = [(time.monotonic(), host) for host in away]
    hosts = now_on = placement
    joining: Change | None = None  # until its first step
    next_try: Successor | None = None  # that is ready
    has_trained = pause is not None
    before = hosts, now_on  # that change
    if absent:
        verdict = judge(hosts.hosts, failures, absent, limits, time.monotonic(), has_trained=has_trained)
        if not verdict.hosts:
            _say(f"the job does not go on: {verdict.reason}")
            return 1
        now_on = hosts.without(set(away))
        _say(_follows(now_on, hosts))
    while True:
        if changes is not None:
            changes.begin(hosts, now_on)
        try:
            if changes is not None and next_try is not None:
                ended = next_try.to_end(changes.look)
            else:
                ended = run(now_on, pause)
        except LaunchError as error:
            next_try = None
            change = changes.take() if changes is not None else None
            away = [host for host in error.hosts if host in hosts.hosts]
            if joining is not None:
                (hosts, now_on), account = before, f"without {', '.join(joining.joined)}: {error}"
                _say(f"the job goes on as before, {account}")
                joining = None
                continue
            if pause is None or not away:
                raise
            absent += [(time.monotonic(), host) for host in away]
            account = str(error)
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
                    return 128 + signal.SIGTERM
                before, (hosts, now_on) = (hosts, now_on), (change.hosts, change.now_on)
                joining = change if change.joined else None
                has_trained = True
                pause = Pause(change.text, step + 1, since)
                _say(f"{change.text} after step {step}; going on on {_where(now_on)}")
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
                (hosts, now_on), joining = before, None
                _say(f"going on as before, on {_where(now_on)}")
                continue
            failures.append(failure)
            pause = Pause(failure.cause, failure.step, failure.failed_at)
            account = f"{number}{_account(failure)}"
        joining = None
        if change is not None:
            hosts = change.hosts
        verdict = judge(hosts.hosts, failures, absent, limits, time.monotonic(), has_trained=has_trained)
        if not verdict.hosts:
            _say(f"{account}; not started again: {verdict.reason}")
            return failures[-1].code if failures else 1
        now_on = hosts.without(set(hosts.hosts) - set(verdict.hosts))
        _say(f"{account}; {_follows(now_on, hosts)}")


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
    return f"starting again on {', '.join(now_on.hosts)}{less}"


def _say(text: str) -> None:
    print(f"mpitrain: {text}", file=sys.stderr, flush=True)
