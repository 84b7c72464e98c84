"""Rows of the policy (policy.py) for a job that waits for hosts that were just lost, because too few are left.

    Failed, NotStarted ─> too few are left ─> Wait ─┬─> Answered: enough answer again ─> Start
                                                    ├─> Fit: enough have joined ───────> Start
                                                    ├─> the time is up, or StopAsked ──> Start, only to save
                                                    └─> Interrupted ───────────────────> End

A host may come back as early as at any restart (where.py). From then on it is asked every few seconds. No attempt runs,
so nothing else happens to the job. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mpitrain.launch import changes, events
from mpitrain.launch.events import Action, Event, Find, JobState, LostWait, Reply
from mpitrain.launch.where import WAIT_SECONDS, Verdict, back_at

ASK_SECONDS = 5.0

Next = tuple[JobState, list[Action], str]


def is_useful(state: JobState, now: float, verdict: Verdict) -> bool:
    """True if hosts that were lost may make the job whole. At its first start it does not wait for hosts."""
    is_late = state.wait_until is not None and now >= state.wait_until
    return bool(verdict.lost) and state.pause is not None and not is_late


def begin(state: JobState, now: float, verdict: Verdict, there: frozenset[str]) -> tuple[JobState, str]:
    """Return the state of a job that waits, and what to say. The hosts that are `there` can take part."""
    until = now + WAIT_SECONDS if state.wait_until is None else state.wait_until
    waiting = LostWait(there.intersection(state.hosts.hosts), until, now)
    state = replace(state, saves_for="", waiting=waiting, wait_until=until)
    names = ", ".join(verdict.lost)
    ends = "saves the state and ends the job" if verdict.left and state.has_trained else "ends the job"
    says = f"{verdict.reason}. Waiting for {names}, up to {until - now:.0f} s; `mpitrain tell JOB stop` {ends}"
    return state, says


def missing(state: JobState) -> list[str]:
    """Return the hosts for which the job waits."""
    there = present(state) | state.outside.dropped
    return [host for host in state.hosts.hosts if host not in there]


def present(state: JobState) -> frozenset[str]:
    """Return the hosts of a job that waits that can take part."""
    assert state.waiting is not None
    there = state.waiting.present - state.outside.dropped
    # Who was to leave may have what no other host has any more.
    return there if there.intersection(state.holders) or not state.holders else state.waiting.present


def next(state: JobState, event: Event) -> Next:
    """Return the state after an event, what is to be done, and why the wait is over; "": it is not."""
    match event:
        case events.Waited():
            return _waited(state, event)
        case events.StopAsked():
            saves = "saves its state and ends" if state.has_trained and present(state) else "ends"
            away = f" for {', '.join(missing(state))}" if missing(state) else ""
            reply = Reply(f"it waits no longer{away}; it {saves}", is_accepted=True)
            return replace(state, saved_code=event.code, wait_until=event.at), [reply], "told to stop"
        case events.JoinAsked():
            return _join_asked(state, event)
        case events.Answered():
            return _answered(state, event)
        case events.Fit():
            return _fit(state, event)
    raise TypeError(event)


def _waited(state: JobState, event: events.Waited) -> Next:
    """Ask the hosts that may be back, and those that the inventory has got; or give up."""
    waiting, now = state.waiting, event.at
    assert waiting is not None
    away = missing(state)
    if _is_enough(state):  # a host that was present is back in the inventory
        return state, [], f"{_all(sorted(present(state)), 'answer')}"
    if now >= waiting.until:
        verb = "has" if len(away) == 1 else "have"
        return state, [], f"{', '.join(away)} {verb} not come back in time" if away else "no host has come in time"
    due = [host for host in away if now >= back_at(host, state)]
    new = [host for host in state.outside.new if host not in state.hosts.hosts]
    due += [host for host in new if now >= state.outside.due.get(host, 0.0)]
    if not due or now < waiting.asked + ASK_SECONDS:
        return state, [], ""
    return replace(state, waiting=replace(waiting, asked=now)), [events.AskHosts(tuple(due))], ""


def _answered(state: JobState, event: events.Answered) -> Next:
    """Hosts of the job that answer take part. One that the inventory has got is compared first."""
    back = [host for host in missing(state) if host in event.inside]
    if back:
        state = _with(state, back)
        return state, [], f"{_all(back, 'answer')}" if _is_enough(state) else ""
    new = [host for host in state.outside.new if host in event.inside and host not in state.hosts.hosts]
    find = Find(",".join(new), state.attempt, state.hosts, state.hosts, by_itself=True)
    return state, [find] if new else [], ""


def _join_asked(state: JobState, event: events.JoinAsked) -> Next:
    """A user asks hosts to join, perhaps ones that were lost."""
    if event.leave:
        return state, [Reply(changes.why_not(state))], ""
    joining = {item.partition("/")[0] for item in event.text.split(",")} - present(state)
    others = state.hosts.without(joining)
    if not others.places:
        return state, [Reply("it would have no other host; wait until it has started again")], ""
    return state, [Find(event.text, state.attempt, others, others)], ""


def _fit(state: JobState, event: events.Fit) -> Next:
    """They can take part, and do."""
    find = event.find
    joined = event.wider.hosts[len(find.now_on.hosts) :]
    if not set(state.hosts.hosts) <= set(event.hosts.hosts):  # asked before the wait, and others were to leave
        return state, [] if find.by_itself else [Reply(changes.why_not(state))], ""
    state = _with(changes.changed(state, event.hosts), joined)
    why = _all(joined, "join")
    follows = "it starts again" if _is_enough(state) else f"it still waits for {', '.join(missing(state))}"
    replies: list[Action] = [] if find.by_itself else [Reply(f"{why}; {follows}", is_accepted=True)]
    return state, replies, why if _is_enough(state) else ""


def _with(state: JobState, hosts: Sequence[str]) -> JobState:
    """These hosts can take part, too."""
    assert state.waiting is not None
    return replace(state, waiting=replace(state.waiting, present=state.waiting.present.union(hosts)))


def _is_enough(state: JobState) -> bool:
    return len(present(state)) >= max(1, state.limits.min_nodes)


def _all(hosts: Sequence[str], verb: str) -> str:
    return f"{', '.join(hosts)} {verb}{'s' * (len(hosts) == 1)}"
