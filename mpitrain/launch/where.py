"""Where a job starts again after a failure, and when a new start is useless: pure functions of past events.

A host that fell silent or does not answer is set aside, each time for longer. A host that answers stays, unless one of
its ranks was the first to fail twice in a row. Then this host is set aside too, if that leaves `min_nodes`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from mpitrain.launch.ending import is_kill
from mpitrain.launch.events import FailedAttempt, JobState

# An agent that was cut off ends the job's part on its host within 30 s; no host returns before that.
ASIDE_SECONDS = 60.0  # the first time; the time doubles each time after that
MOST_ASIDE_SECONDS = 3600.0
# So long a job waits for lost hosts when too few are left: a machine may take some minutes to start again.
WAIT_SECONDS = 300.0
# The third failure in the same step is not a coincidence.
_MOST_AT_A_STEP = 3
_COUNTED = "Only mt.Trainer and mt.keep count steps; any other script would begin anew"


@dataclass(frozen=True)
class Verdict:
    """What to do after a failure."""

    hosts: tuple[str, ...] = ()  # where to start again; if it is empty, the job ends
    reason: str = ""  # why
    left: tuple[str, ...] = ()  # the hosts that can take part, if they are too few
    lost: tuple[str, ...] = ()  # the others, if they were lost just now and would be enough


def judge(state: JobState, now: float, present: Set[str], silent: Set[str] = frozenset()) -> Verdict:
    """Decide whether to start again, and where.

    `present` are the hosts of the last attempt that were not bad in it; what they did before does not count. `silent`
    are those that are known not to answer now.

    A host that was lost again and again is set aside for longer and longer, but is used before the job ends for want of
    hosts. An elastic job takes hosts in when they answer. So it uses one that was bad, and is not present, only if the
    others are too few. One holder takes part in any case: what a host holds is dropped when it does not.
    """
    hosts, limits, failures, absent = state.hosts.hosts, state.limits, state.failures, state.absent
    last = failures[-1] if failures else FailedAttempt("", 1, now)
    is_early = last.step is None and not last.lost and not state.has_trained
    if len(failures) == 1 and is_early and limits.counts_steps:
        return Verdict(reason=f"it failed before its first step, and would fail again. {_COUNTED}")
    same = [failure for failure in failures if failure.step == last.step and limits.counts_steps]
    if len(same) >= _MOST_AT_A_STEP:
        return Verdict(reason=_diagnosis(same, len(hosts)))
    if len(failures) > limits.most_restarts:
        return Verdict(reason="no attempt is left")
    away = _away(failures, absent)
    gone = ({host for when, host in away if now < when + ASIDE_SECONDS} | silent) - present
    spared = _set_aside(_suspects(failures), now) | (_set_aside(away, now) - present)
    if limits.max_nodes is not None:
        spared |= {host for _, host in away} - present
    there = [host for host in hosts if host not in gone]
    if len(there) < limits.min_nodes or not there:
        problem = f"only {', '.join(there)} of {', '.join(hosts)} can take part" if there else "no host can take part"
        is_enough = len(hosts) >= max(1, limits.min_nodes)
        lost = tuple(host for host in hosts if host in gone) if is_enough else ()
        return Verdict(reason=f"{problem}, and {limits.words}", left=tuple(there), lost=lost)
    best = [host for host in there if host not in spared]
    chosen = (best if len(best) >= limits.min_nodes and best else there)[: limits.max_nodes]
    if not state.holders.intersection(chosen):
        chosen = [*[host for host in there if host in state.holders][:1], *chosen][: limits.max_nodes]
    return Verdict(tuple(chosen))


def times_bad(host: str, failures: Sequence[FailedAttempt], absent: Sequence[tuple[float, str]]) -> list[float]:
    """Return when this host was lost or absent, or was the first to fail twice in a row."""
    return [when for when, bad_host in [*_away(failures, absent), *_suspects(failures)] if bad_host == host]


def back_at(host: str, state: JobState) -> float:
    """Return when a host that was lost may take part again at the earliest."""
    away = _away(state.failures, state.absent)
    return max((when + ASIDE_SECONDS for when, bad_host in away if bad_host == host), default=0.0)


def aside_until(times: Sequence[float]) -> float:
    """Return until when a host is set aside that was found bad at these times; at least one."""
    return max(times) + min(ASIDE_SECONDS * 2.0 ** (len(times) - 1), MOST_ASIDE_SECONDS)


def _away(failures: Sequence[FailedAttempt], absent: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    return [(failure.when, host) for failure in failures for host in failure.lost] + list(absent)


def _suspects(failures: Sequence[FailedAttempt]) -> list[tuple[float, str]]:
    return [(b.when, b.host) for a, b in pairwise(failures) if b.host and a.host == b.host]


def _set_aside(bad: Sequence[tuple[float, str]], now: float) -> set[str]:
    """Return the hosts that are set aside now, from the times at which each was found bad."""
    return {
        host
        for host in {host for _, host in bad}
        if now < aside_until([when for when, bad_host in bad if bad_host == host])
    }


def _diagnosis(same: Sequence[FailedAttempt], num_hosts: int) -> str:
    """Describe what the attempts that failed at the same step have in common."""
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
