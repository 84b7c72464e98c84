"""What follows after a failure of a job, or a change of its hosts: pure functions of what has happened so far.

Whether the job is started again, and on which hosts; and what changes when hosts leave it or join it (changes.py
carries that out).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.launch.ending import is_kill
from mpitrain.launch.placement import Placement, parse_hosts

# A guard that was cut off ends the job's part on its host within 30 s; no host returns before that.
ASIDE_SECONDS = 60.0  # the first time; the time doubles each time after that
MOST_ASIDE_SECONDS = 3600.0
# The third failure in the same step is no accident.
_MOST_AT_A_STEP = 3
_COUNTED = "Only mt.Trainer and mt.keep count steps; any other script would begin anew"
# An elastic job that has found a host bad so many times does not take the host in again by itself.
MOST_TIMES_BAD = 3


DEFAULT_RESTARTS = 3


@dataclass(frozen=True)
class Limits:
    """How often a job may be started again, and on how many hosts.

    Attributes:
        restarts: after failures, at most. None: DEFAULT_RESTARTS if an attempt has taken a checkpoint, in memory or on
            disk, or resumed from one; else 0.
        min_nodes: the fewest hosts.
        max_nodes: the most hosts of an elastic job, which takes hosts in by itself; None: those that it has.
    """

    restarts: int | None = 0
    min_nodes: int = 1
    max_nodes: int | None = None

    @property
    def most_restarts(self) -> int:
        """How often a job with a checkpoint may be started again."""
        return DEFAULT_RESTARTS if self.restarts is None else self.restarts

    @property
    def words(self) -> str:
        """What the user has said about the number of hosts, or the default."""
        if self.max_nodes is None:
            return f"the job needs {'one' if self.min_nodes == 1 else self.min_nodes}"
        return f"--nnodes is {self.min_nodes}{f':{self.max_nodes}' * (self.max_nodes > self.min_nodes)}"


@dataclass(frozen=True)
class FailedTry:
    """An attempt that failed.

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
    """What to do after a failure: start again on `hosts`, or, if `hosts` is empty, end because of `reason`.

    Attributes:
        hosts: where to start again.
        reason: why not.
        left: the hosts that can take part, if they are too few.
    """

    hosts: tuple[str, ...] = ()
    reason: str = ""
    left: tuple[str, ...] = ()


def judge(
    hosts: Sequence[str],
    failures: Sequence[FailedTry],
    absent: Sequence[tuple[float, str]],
    limits: Limits,
    now: float,
    *,
    has_trained: bool = False,
    present: Set[str] = frozenset(),
) -> Verdict:
    """Decide whether to start again, and where.

    Args:
        hosts: the hosts that the user named, in order.
        failures: all failed attempts so far; none if only hosts were absent.
        absent: the hosts that did not answer when an attempt was about to start, each with the time.
        limits: what the user allows.
        now: the present time, by the clock of the failures.
        has_trained: an attempt before made steps, and its hosts changed.
        present: the hosts of the last attempt that were not bad in it; what they did before does not count.

    A host that was lost again and again is set aside for longer and longer, but is used before the job ends for want of
    hosts. An elastic job takes hosts in when they answer. So it uses one that was bad, and is not present, only if the
    others are too few.
    """
    last = failures[-1] if failures else FailedTry("", 1, now)
    if len(failures) == 1 and last.step is None and not last.lost and not has_trained:
        return Verdict(reason=f"it failed before its first step, and would fail again. {_COUNTED}")
    same = [failure for failure in failures if failure.step == last.step]
    if len(same) >= _MOST_AT_A_STEP:
        return Verdict(reason=_diagnosis(same, len(hosts)))
    if len(failures) > limits.most_restarts:
        return Verdict(reason="no attempt is left")
    away = _away(failures, absent)
    gone = {host for when, host in away if now < when + ASIDE_SECONDS} - present
    spared = _set_aside(_suspects(failures), now) | (_set_aside(away, now) - present)
    if limits.max_nodes is not None:
        spared |= {host for _, host in away} - present
    there = [host for host in hosts if host not in gone]
    if len(there) < limits.min_nodes or not there:
        problem = f"only {', '.join(there)} of {', '.join(hosts)} can take part" if there else "no host can take part"
        return Verdict(reason=f"{problem}, and {limits.words}", left=tuple(there))
    best = [host for host in there if host not in spared]
    return Verdict(tuple(best if len(best) >= limits.min_nodes and best else there)[: limits.max_nodes])


def times_bad(host: str, failures: Sequence[FailedTry], absent: Sequence[tuple[float, str]]) -> list[float]:
    """Return when this host was lost or absent, or was the first to fail twice in a row."""
    return [when for when, bad_host in [*_away(failures, absent), *_suspects(failures)] if bad_host == host]


def aside_until(times: Sequence[float]) -> float:
    """Return until when a host is set aside that was found bad at these times; at least one."""
    return max(times) + min(ASIDE_SECONDS * 2.0 ** (len(times) - 1), MOST_ASIDE_SECONDS)


def _away(failures: Sequence[FailedTry], absent: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    return [(failure.when, host) for failure in failures for host in failure.lost] + list(absent)


def _suspects(failures: Sequence[FailedTry]) -> list[tuple[float, str]]:
    return [(b.when, b.host) for a, b in pairwise(failures) if b.host and a.host == b.host]


def _set_aside(bad: Sequence[tuple[float, str]], now: float) -> set[str]:
    """Return the hosts that are set aside now, from the times at which each was found bad."""
    return {
        host
        for host in {host for _, host in bad}
        if now < aside_until([when for when, bad_host in bad if bad_host == host])
    }


def _diagnosis(same: Sequence[FailedTry], num_hosts: int) -> str:
    """Say what the attempts that failed at the same step have in common."""
    step = same[-1].step
    parts = [f"{len(same)} attempts failed {f'at step {step}' if step else 'before their first step'}"]
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
        parts.append(
            "every attempt began at step 1: no checkpoint was found; the hook mt.Checkpoint writes checkpoints"
        )
    return "; ".join(parts)


# The ranks of the next attempt must be ready within this time, or the present ones end first.
READY_SECONDS = 120.0


@dataclass(frozen=True)
class Change:
    """A change that was accepted.

    Attributes:
        text: as in "node2 leaves".
        hosts: those of the job from now on, with those that are set aside.
        now_on: where the next attempt runs.
        joined: the hosts that come in with it.
        is_end: too few hosts would be left, so the ranks save, and the job ends.
        ready_seconds: the time in which the ranks of the next attempt must be ready.
    """

    text: str
    hosts: Placement
    now_on: Placement
    joined: tuple[str, ...] = ()
    is_end: bool = False
    ready_seconds: float = READY_SECONDS

    @property
    def where(self) -> str:
        """The hosts of the next attempt, as text."""
        return ", ".join(self.now_on.hosts)


def leaving(hosts: Placement, now_on: Placement, leave: Sequence[str]) -> Change:
    """Return the change in which these hosts leave. `hosts` are all hosts of the job, `now_on` those that train."""
    text = f"{', '.join(leave)} leave{'s' * (len(leave) == 1)}"
    return Change(text, hosts.without(set(leave)), now_on.without(set(leave)))


def change_of(
    wish: Mapping[str, Any],
    hosts: Placement,
    now_on: Placement,
    limits: Limits,
    widen: Callable[[Placement, str], Placement],
    check: Callable[[Placement], None],
) -> Change:
    """Return the change that somebody wishes (control.py): hosts leave, or join, or both at once.

    For the other arguments see `joining`.

    Raises:
        ConfigError: a host that leaves is not in the job, too few would be left, or see `joining`.
        LaunchError: see `joining`.
    """
    leave, text = list(wish.get("leave", ())), str(wish.get("join", "") if "leave" in wish else wish["join"])
    _refuse_few(now_on, leave, limits, len(parse_hosts(text)) if text else 0)
    if not leave:
        return joining(hosts, now_on, text, limits, widen, check)
    change = leaving(hosts, now_on, leave)
    if not text:
        return change
    joined = joining(change.hosts, change.now_on, text, limits, widen, check)
    return replace(joined, text=f"{change.text} and {joined.text}")


def _refuse_few(now_on: Placement, leave: Sequence[str], limits: Limits, num_joining: int) -> None:
    for host in leave:
        if host not in now_on.hosts:
            raise ConfigError(f"{host} is not a host of the job; its hosts are {', '.join(now_on.hosts)}")
    num_left = len(set(now_on.hosts) - set(leave))
    if leave and (not num_left or num_left + num_joining < limits.min_nodes):
        left = f"only {num_left} of its hosts would be left" if num_left else "no host would be left"
        raise ConfigError(f"{left}, and {limits.words}; `mpitrain kill` ends a job")


def joining(
    hosts: Placement,
    now_on: Placement,
    text: str,
    limits: Limits,
    widen: Callable[[Placement, str], Placement],
    check: Callable[[Placement], None],
) -> Change:
    """Return the change in which the hosts of `text` join.

    Args:
        hosts: all hosts of the job.
        now_on: those that train.
        text: the new hosts, in the form of --hosts.
        limits: the most hosts.
        widen: see Changes.
        check: see Changes.

    Raises:
        ConfigError: a host is unknown, or in the job already, or there would be too many.
        LaunchError: a host does not answer, or differs.
    """
    wider = widen(now_on, text)
    if limits.max_nodes is not None and len(wider.hosts) > limits.max_nodes:
        raise ConfigError(
            f"it would run on {len(wider.hosts)} hosts, and {limits.words}; `mpitrain scale JOB -HOST` makes room"
        )
    joined = wider.hosts[len(now_on.hosts) :]
    addresses = {host: at for host, at in wider.addresses.items() if host in joined or host == wider.own}
    check(replace(wider, places=wider.places[len(now_on.hosts) :], addresses=addresses))
    aside = set(hosts.hosts) - set(now_on.hosts) - set(joined)
    all_hosts = widen(hosts.without(set(joined)), text) if aside else wider
    return Change(f"{', '.join(joined)} join{'s' * (len(joined) == 1)}", all_hosts, wider, joined)
