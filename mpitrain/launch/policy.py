"""What follows after each event of a job: one pure function, `next`. supervisor.py carries out what it returns.

    Start ─> Done: End, code 0
      ^  ├─> Failed, NotStarted: judge (where.py) ─┬─> hosts: Start there; the script continues from memory, or its
      │  │                                         │    newest checkpoint
      │  │                                         └─> none: say why; End with the code of the last failure
      └──┴─> Left: the hosts have changed (changes.py): Start

If too few hosts are left after a failure, and some were lost just now, the job waits for these (lost_wait.py). If they
do not come back, it starts once more on those that are left, only to save its state. No step is made: another part of a
broken network may still make the next one, and what is saved must not be ahead of it. If nothing can be saved, the
keepers keep the state for another launcher.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence, Set
from dataclasses import replace

from mpitrain.launch import changes, events, lost_wait
from mpitrain.launch.events import Action, Change, End, Event, FailedAttempt, JobState, Limits, Pause, Say, Start
from mpitrain.launch.kept import STAYS
from mpitrain.launch.placement import Placement
from mpitrain.launch.where import Verdict, judge

Next = tuple[JobState, list[Action]]

_ENDS = events.Done, events.Interrupted, events.Failed, events.Left, events.NotStarted


def begin(limits: Limits, hosts: Placement, pause: Pause | None = None) -> JobState:
    """Return the state of a job before its first attempt, or before the first one of another launcher: with `pause`."""
    is_resumed = pause is not None
    holders = frozenset(hosts.hosts) if is_resumed else frozenset[str]()
    now_on = hosts.first(limits.max_nodes)
    return JobState(limits, hosts, now_on, pause, has_trained=is_resumed, has_checkpoint=is_resumed, holders=holders)


def next(state: JobState, event: Event) -> Next:
    """Return the state after an event, and what is to be done, in this order."""
    change, drops, takes_over = state.change, list[Action](), False
    if isinstance(event, _ENDS):  # the attempt that is prepared takes over only if the ranks have left for it
        is_prepared = state.prepared_since is not None
        takes_over = is_prepared and isinstance(event, events.Left) and event.is_ready and not state.saves_for
        drops = [events.Drop()] if is_prepared and not takes_over else []
        state = replace(state, is_running=False, change=None, prepared_since=None)
    match event:
        case events.JobBegun():
            state, actions = _begun(state, event)
        case events.Done():
            state, actions = _done(state, event, change)
        case events.Interrupted():
            says = ["a signal ends the job, which waited for lost hosts"] if state.waiting is not None else []
            state, actions = _end(replace(state, waiting=None), event.code, "a signal to the launcher", *says)
        case events.Failed():
            state, actions = _failed(state, event, change)
        case events.Left():
            state, actions = _left(state, event, change, takes_over=takes_over)
        case events.NotStarted():
            state, actions = _not_started(state, event, change)
        case events.Waited() | events.StopAsked() | events.JoinAsked() | events.Fit() | events.Answered() if (
            state.waiting is not None
        ):
            state, actions, why = lost_wait.next(state, event)
            state, more = _after_wait(state, event.at, why)
            actions = [*actions, *more]
        case events.Waited():
            actions = []
        case events.StopAsked():
            actions = [events.Reply("it does not wait for hosts")]
        case events.RanksSaid():
            state, actions = changes.ranks_said(state, event)
        case events.Ready():
            state, actions = changes.ready(state)
        case events.NotPrepared():
            state, actions = changes.not_prepared(state, event)
        case events.LeaveAsked():
            state, actions = changes.leave_asked(state, event)
        case events.JoinAsked():
            state, actions = changes.join_asked(state, event)
        case events.Fit():
            state, actions = changes.fit(state, event)
        case events.Unfit():
            state, actions = changes.unfit(state, event)
        case events.Listed():
            state, actions = changes.listed(state, event)
        case events.Answered():
            state, actions = changes.answered(state, event)
        case _:
            raise TypeError(event)
    return state, drops + actions


def _begun(state: JobState, event: events.JobBegun) -> Next:
    """Some hosts of a job that another launcher had may be silent: it continues without them."""
    if not event.silent:
        return _start(state)
    state = replace(state, absent=(*state.absent, *((event.at, host) for host in event.silent)))
    verdict = judge(state, event.at, set())
    if not verdict.hosts:
        return _end(state, 1, verdict.reason, f"the job does not continue: {verdict.reason}")
    state = replace(state, now_on=_only(state.hosts, verdict.hosts))
    return _start(state, f"starting again on {_follows(state)}")


def _done(state: JobState, event: events.Done, change: Change | None) -> Next:
    says = []
    if change is not None:
        says.append(f"the job ended before its hosts could change: {change.text}")
    if state.failures:
        says.append(f"{_number(state)} succeeded")
    return _end(state, event.code, "", *says)


def _failed(state: JobState, event: events.Failed, change: Change | None) -> Next:
    failure, joining = event.failure, state.joining
    has_checkpoint = state.has_checkpoint or event.has_checkpoint
    has_copied = failure.step is not None and failure.step > (failure.first or 0)
    holders = (frozenset(state.now_on.hosts) if has_copied else state.holders) - set(failure.lost)
    state = replace(state, has_checkpoint=has_checkpoint, holders=holders)
    if not state.limits.most_restarts or (state.limits.restarts is None and not has_checkpoint):
        return _end(state, failure.code, failure.cause)
    if state.saves_for:
        return _not_saved(state, failure.cause)
    if joining is not None and failure.step is None:
        names = ", ".join(joining.joined)
        # Whatever the cause, they are set aside: an elastic job would take them in again at once.
        blamed = [host for host in joining.joined if host in failure.lost or not failure.lost]
        state = _go_back(state, blamed, failure.when)
        why = f"with {names}, the job failed before its first step: {failure.cause}"
        return _start(state, why, f"continuing as before, on {_where(state)}")
    account = f"{_number(state)}{_account(failure, counts_steps=state.limits.counts_steps)}"
    state = replace(
        state,
        failures=(*state.failures, failure),
        has_trained=state.has_trained or failure.step is not None,
        pause=Pause(failure.cause, failure.step, failure.failed_at),
        # One that loses its hosts before it has made a step waits no longer for them than the one before.
        wait_until=None if failure.step is not None or not state.limits.counts_steps else state.wait_until,
    )
    return _start_again(state, event.at, account, failure.lost, change)


def _left(state: JobState, event: events.Left, change: Change | None, *, takes_over: bool) -> Next:
    """All ranks have ended after a step, so that the hosts can change, or because it is saved."""
    told = {state.now_on.host_of(rank): rank for rank in event.told if rank not in state.heeded}
    holders, told = frozenset(state.now_on.hosts), {**state.told, **told}
    state = replace(
        state, told=told, has_trained=True, has_checkpoint=True, holders=holders, joining=None, wait_until=None
    )
    after = f"after step {event.step}"
    if state.saves_for:
        says = f"{state.saves_for}: the job has ended {after}, which is saved"
        return _end(state, state.saved_code or _code(state), state.saves_for, says)
    if change is None:  # it was dropped at that moment
        state = replace(state, pause=Pause("the ranks had left", event.step + 1, event.since))
        return _start(state, f"the ranks had left {after}; starting again on {_where(state)}")
    if change.is_end:
        return _end(state, 128 + signal.SIGTERM, change.text, f"{change.text}: the job has ended {after}")
    state = replace(
        changes.changed(state, change.hosts),
        before=(state.hosts, state.now_on),
        now_on=change.now_on,
        joining=change if change.joined else None,
        pause=Pause(change.text, event.step + 1, event.since),
    )
    return _start(state, f"{change.text} {after}; continuing on {_where(state)}", takes_over=takes_over)


def _not_started(state: JobState, event: events.NotStarted, change: Change | None) -> Next:
    """Continue without the hosts that cannot take part, or end with the error."""
    saves_for, joining, account = state.saves_for, state.joining, event.problem
    state = replace(state, saves_for="")
    away = [host for host in event.away if host in state.hosts.hosts]
    if state.is_elastic and event.different and state.hosts.own not in event.different:
        if all(host in event.different for host in away):
            account = "; ".join(f"{host} cannot take part: {text}" for host, text in event.different.items())
        different = {host: text for host, text in event.different.items() if host not in away}
        state = changes.noted(state, different, event.at)
        away += different
    if joining is not None:  # a host that does not answer now may still have the state, and is used again
        blamed = [host for host in joining.joined if host in away or not away]
        says = f"the job continues as before, without {', '.join(joining.joined)}: {account}"
        return _start(_go_back(state, blamed, event.at), says)
    if not away and saves_for:
        return _not_saved(replace(state, saves_for=saves_for), account)
    if not away or (state.pause is None and not state.is_elastic):
        leaves = [events.LeaveState(account)] if state.holders else []
        return state, [*leaves, End(1, account, is_error=True)]
    state = replace(
        state,
        absent=(*state.absent, *((event.at, host) for host in away)),
        holders=state.holders - set(away),
    )
    # The job has given up the hosts that do not take part in an attempt that only saves.
    silent = set(state.hosts.hosts) - set(state.now_on.hosts) if saves_for else set[str]()
    return _start_again(state, event.at, account, away, change, silent)


def _start_again(
    state: JobState,
    now: float,
    account: str,
    away: Sequence[str],
    change: Change | None,
    silent: Set[str] = frozenset(),
) -> Next:
    """Choose where to start after a failure, without the hosts that are away, and name it after the account."""
    hosts = (state.hosts if change is None else change.hosts).without(state.outside.dropped)
    if state.holders and not state.holders.intersection(hosts.hosts):
        hosts = state.hosts  # who was to leave has what no other host has any more
    state = replace(changes.changed(state, hosts), joining=None)
    present = frozenset(state.now_on.hosts) - set(away)
    return _follow(state, now, judge(state, now, present, silent), account, present)


def _follow(state: JobState, now: float, verdict: Verdict, account: str, present: frozenset[str]) -> Next:
    """Do what the verdict says, and name it after the account. `present` are the hosts that can take part for sure."""
    again = " again" if state.pause is not None else ""
    if verdict.hosts:
        state = replace(state, saves_for="", now_on=_only(state.hosts, verdict.hosts))
        return _start(state, *_lines(account, f"starting{again} on {_follows(state)}"))
    if lost_wait.is_useful(state, now, verdict):
        state, follows = lost_wait.begin(state, now, verdict, present)
        return state, [*map(Say, _lines(account, follows)), events.Wait()]
    if verdict.left and state.has_trained:
        state = replace(state, saves_for=verdict.reason, now_on=_only(state.hosts, verdict.left))
        follows = f"{verdict.reason}. Starting again on {', '.join(verdict.left)} only to save the state"
        return _start(state, *_lines(account, follows))
    return _end(state, _code(state), account, *_lines(account, f"not started{again}: {verdict.reason}"))


def _after_wait(state: JobState, now: float, why: str) -> Next:
    """A wait for lost hosts continues, or is over for this reason."""
    if not why:
        return state, []
    present = lost_wait.present(state)
    verdict = judge(state, now, present, set(state.hosts.hosts) - present)
    return _follow(replace(state, waiting=None), now, verdict, why, present)


def _start(state: JobState, *says: str, takes_over: bool = False) -> Next:
    """An attempt begins. Of those before only the failures count, and what SIGTERM has told the hosts of this one."""
    hosts = state.now_on.hosts
    state = replace(
        state,
        attempt=state.attempt + 1,
        is_running=True,
        holders=state.holders.intersection(hosts),
        pause=state.pause and replace(state.pause, only_saves=bool(state.saves_for)),
        command=STAYS,
        run=0,
        is_ending=False,
        told={host: rank for host, rank in state.told.items() if host in hosts},
        heeded=frozenset(),
        outside=changes.taken_in(state.outside, hosts),
    )
    return state, [*map(Say, says), Start(state.hosts, state.pause, takes_over)]


def _end(state: JobState, code: int, reason: str, *says: str) -> Next:
    return state, [*map(Say, says), End(code, reason)]


def _not_saved(state: JobState, cause: str) -> Next:
    """Leave the state to the keepers."""
    says = f"{state.saves_for}; the state was not saved: {cause}"
    return state, [Say(says), events.LeaveState(state.saves_for), End(_code(state), says)]


def _go_back(state: JobState, blamed: Sequence[str], when: float) -> JobState:
    """Continue where the job was before hosts joined. An elastic job takes them in later."""
    assert state.before is not None
    hosts, now_on = state.before
    absent = (*state.absent, *((when, host) for host in blamed))
    if state.is_elastic:
        others = [place for place in state.hosts.places if place.host not in hosts.hosts]
        addresses = {**state.hosts.addresses, **hosts.addresses}
        hosts = replace(hosts, places=(*hosts.places, *others), addresses=addresses).without(set())
    return replace(state, hosts=hosts, now_on=now_on, joining=None, absent=absent)


def _only(placement: Placement, hosts: Sequence[str]) -> Placement:
    return placement.without(set(placement.hosts) - set(hosts))


def _code(state: JobState) -> int:
    return state.failures[-1].code if state.failures else 1


def _number(state: JobState) -> str:
    return f"attempt {len(state.failures) + 1} of {state.limits.most_restarts + 1}"


def _account(failure: FailedAttempt, *, counts_steps: bool) -> str:
    """Describe how an attempt went, after its number."""
    begun = f", from step {failure.first - 1}," if failure.first and failure.first > 1 else ""
    at = f" at step {failure.step}" if failure.step else " before its first step" if counts_steps else ""
    return f"{begun} failed{at}: {failure.cause}"


def _where(state: JobState) -> str:
    return f"{', '.join(state.now_on.hosts)} with {state.now_on.num_ranks} ranks"


def _follows(state: JobState) -> str:
    aside = [host for host in state.hosts.hosts if host not in state.now_on.hosts]
    less = f" with {state.now_on.num_ranks} ranks, without {', '.join(aside)}" if aside else ""
    return f"{', '.join(state.now_on.hosts)}{less}"


def _lines(account: str, follows: str) -> list[str]:
    """Say what happened and what follows, in one line if the first is one."""
    return [account, follows] if "\n" in account else [f"{account}; {follows}"]
