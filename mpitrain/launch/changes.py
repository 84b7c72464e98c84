"""Rows of the policy (policy.py) for changes of the hosts of a running job. Pure functions.

    asked ─> can it be? ─┬─> accepted ─> Prepare: the next attempt starts, on other hosts ─> Ready ─> Tell: LEAVES
                         │                                         ─> Left after the next copy ─> Start: it takes over
                         └─> refused, and why; the job does not notice

Only the first run of a script can be left and continued: a later one would have to begin with it. A run is that of a
Trainer, or a loop with mt.keep. If the next attempt cannot start beside the present one, it starts when that has ended.

An elastic job takes in by itself the hosts that answer again, and lets go those that its inventory has lost. A host
that was found bad is first set aside for the time that a restart would wait for it (where.py), and is not asked again
after the third time. A host that has left because somebody asked is no longer one of the job, so it is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpitrain.launch import events
from mpitrain.launch.events import READY_SECONDS, Action, Change, Drop, Event, Find, JobState, Outside, Reply, Say, Tell
from mpitrain.launch.kept import LEAVES, PREPARES, SAVES, STAYS
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.where import aside_until, times_bad
from mpitrain.watching.ranges import rank_ranges

FIRST_RUN = 1
# mpiexec sends SIGTERM to ranks too, when it ends them because of another one, whose end is heard within this time.
SETTLE_SECONDS = 1.5
# A host that is about to be taken away has less time than READY_SECONDS.
READY_SECONDS_OF_TOLD = 10.0
# A host that does not answer is asked again after this time, which doubles each time.
FIRST_SECONDS, MOST_SECONDS = 10.0, 300.0
# A host that answers and differs.
DIFFERENT_SECONDS = 600.0
# An elastic job that has found a host bad so many times does not take the host in again by itself.
MOST_TIMES_BAD = 3

_STARTS = "the job is being started again; try again in a moment"

Next = tuple[JobState, list[Action]]


def why_not(state: JobState) -> str:
    """Return why the hosts of the job cannot change now; "": they can."""
    if state.waiting is not None:
        return "the job waits for hosts that were lost, and hosts can only join it now: `mpitrain scale JOB +HOST`"
    if not state.is_running:
        return _STARTS
    if state.change is not None:
        return f"another change is under way: {state.change.text}"
    if state.saves_for:
        return f"the job only saves its state, because {state.saves_for}"
    if state.run > FIRST_RUN:
        return f"it is in run {state.run} of its script, and the hosts of a job change in the first one only"
    if state.run < FIRST_RUN:
        return (
            "the hosts of a job change while a Trainer, or a loop with mt.keep, copies its state to memory, and "
            "none does so now. If its training is about to begin, try again in a moment"
        )
    return ""


def is_open(state: JobState) -> bool:
    """True if an elastic job may change its hosts now by itself."""
    return state.is_elastic and not state.is_ending and not why_not(state)


def reads_inventory(state: JobState) -> bool:
    """True if what the inventory has may matter now."""
    return is_open(state) or (state.is_elastic and state.waiting is not None)


def leave_asked(state: JobState, event: events.LeaveAsked) -> Next:
    """A user asks hosts to leave."""
    if problem := why_not(state) or _why_no_leave(state, event.hosts):
        return state, [Reply(problem)]
    state, actions, _ = _part(state, event, list(event.hosts))
    return state, [*actions, _accepted(state)]


def join_asked(state: JobState, event: events.JoinAsked) -> Next:
    """A user asks hosts to join, and others to leave. It takes seconds to find out whether they can join."""
    leave = set(event.leave)
    num_joining = len({item.partition("/")[0] for item in event.text.split(",")})
    if problem := why_not(state) or (_why_no_leave(state, event.leave, num_joining) if leave else ""):
        return state, [Reply(problem)]
    return state, [Find(event.text, state.attempt, state.now_on.without(leave), state.hosts.without(leave))]


def _why_no_leave(state: JobState, leave: Sequence[str], num_joining: int = 0) -> str:
    """Return why these hosts cannot leave, while this many others join; "": they can."""
    now_on, num_left = state.now_on.hosts, len(set(state.now_on.hosts) - set(leave))
    if strange := [host for host in leave if host not in now_on]:
        return f"{strange[0]} is not a host of the job; its hosts are {', '.join(now_on)}"
    if num_left and num_left + num_joining >= state.limits.min_nodes:
        return ""
    left = f"only {num_left} of its hosts would be left" if num_left else "no host would be left"
    return f"{left}, and {state.limits.words}; `mpitrain kill` ends a job"


def fit(state: JobState, event: events.Fit) -> Next:
    """The hosts that would join can take part: the change is accepted, if it still can be."""
    find, wider, most = event.find, event.wider, state.limits.max_nodes
    problem = why_not(state) or (_STARTS if find.attempt != state.attempt else "")
    if problem:  # of no interest if the job itself has asked: it will again
        return state, [] if find.by_itself else [Reply(problem)]
    if most is not None and len(wider.hosts) > most:
        many = f"it would run on {len(wider.hosts)} hosts, and {state.limits.words}"
        return unfit(state, events.Unfit(event.at, find, f"{many}; `mpitrain scale JOB -HOST` makes room"))
    joined, left = wider.hosts[len(find.now_on.hosts) :], [h for h in state.now_on.hosts if h not in wider.hosts]
    leaves = f"{', '.join(left)} leave{'s' * (len(left) == 1)} and " if left else ""
    text = f"{leaves}{', '.join(joined)} join{'s' * (len(joined) == 1)}"
    state, actions = _prepare(state, Change(text, event.hosts, wider, joined), event.at)
    if not find.by_itself:
        return state, [*actions, _accepted(state)]
    state = _put_off(state, joined, event.at)  # if the next attempt fails, perhaps because of another host
    says = f"{', '.join(joined)} answer{'s' * (len(joined) == 1)}; {text} after the next copy of the state"
    return state, [*actions, Say(f"{says}, and then it continues on {', '.join(wider.hosts)}")]


def unfit(state: JobState, event: events.Unfit) -> Next:
    """The hosts that would join cannot. An elastic job asks them again later."""
    if not event.find.by_itself:
        return state, [Reply(event.problem)]
    joining = [item.partition("/")[0] for item in event.find.text.split(",")]
    away = [host for host in joining if host in event.away]  # one without the shared folder too: it is being set up
    different = {host: text for host, text in event.different.items() if host in joining and host not in away}
    if not different and not away:
        different = dict.fromkeys(joining, event.problem)
    news = [host for host, text in different.items() if state.outside.differences.get(host) != text]
    state = noted(_put_off(state, away, event.at), different, event.at)
    again = f"It is asked again in {DIFFERENT_SECONDS / 60:g} minutes"
    return state, [Say(f"{host} cannot take part: {different[host]}. {again}") for host in news]


def _accepted(state: JobState) -> Reply:
    assert state.change is not None
    after = "after the next copy of its state; then it continues on"
    return Reply(f"{state.change.text} {after} {', '.join(state.change.now_on.hosts)}", is_accepted=True)


def _part(
    state: JobState,
    event: Event,
    leave: Sequence[str],
    why: str = "",
    why_end: str = "",
    seconds: float = READY_SECONDS,
) -> tuple[JobState, list[Action], str]:
    """Begin a change without these hosts, or the end if too few are left. Return also what to say."""
    if len(set(state.now_on.hosts) - set(leave)) < max(1, state.limits.min_nodes):
        change = Change(why_end, state.hosts, state.now_on, is_end=True)
        says = f"{why_end}; after the next copy of the state, the job saves and ends"
        return replace(state, change=change, command=SAVES), [Tell(SAVES)], says
    text = f"{', '.join(leave)} leave{'s' * (len(leave) == 1)}" + (f" ({why})" if why else "")
    hosts, now_on = state.hosts.without(set(leave)), state.now_on.without(set(leave))
    state, actions = _prepare(state, Change(text, hosts, now_on, ready_seconds=seconds), event.at)
    says = f"{text}; after the next copy of the state, it continues on {', '.join(now_on.hosts)}"
    return state, actions, says


def _prepare(state: JobState, change: Change, now: float) -> Next:
    state = replace(state, change=change, command=PREPARES, prepared_since=now)
    return state, [Tell(PREPARES), events.Prepare(change.now_on, change.text)]


def ready(state: JobState) -> Next:
    """The next attempt can take over: the ranks leave."""
    if state.command != PREPARES or state.prepared_since is None:
        return state, []
    return replace(state, command=LEAVES), [Tell(LEAVES)]


def not_prepared(state: JobState, event: events.NotPrepared) -> Next:
    """Drop the hosts that would join, or let the present ranks end first. These may have heard that they leave."""
    change = state.change
    if change is None or state.prepared_since is None:
        return state, []
    state = replace(state, prepared_since=None)
    if change.joined and event.problem and event.has_room and state.command == PREPARES:
        blamed = [host for host in change.joined if host in event.faulty or not event.faulty]
        absent = (*state.absent, *((event.at, host) for host in blamed))
        state = replace(state, change=None, command=STAYS, absent=absent)
        text = f"the job continues as before, without {', '.join(change.joined)}: {event.problem}"
        return state, [Drop(), Say(text), Tell(STAYS)]
    follows = "It starts when this one has ended"
    says = [Say(f"the next attempt cannot start beside this one: {event.problem}. {follows}")] if event.problem else []
    return replace(state, command=LEAVES), [Drop(), *says, Tell(LEAVES)]


def ranks_said(state: JobState, event: events.RanksSaid) -> Next:
    """The ranks say in which run they are, and that SIGTERM has told some of them to end."""
    if not state.is_running:
        return state, []
    state, actions, change = replace(state, run=event.run, is_ending=event.is_ending), list[Action](), state.change
    if change is not None and state.run != FIRST_RUN:  # there is nothing to continue with
        drops = [Drop()] if state.prepared_since is not None else []
        state = replace(state, change=None, command=STAYS, prepared_since=None)
        says = f"the training ended before the hosts of the job could change: {change.text}"
        actions = [*drops, Say(says), Tell(STAYS)]
    elif change is not None and state.command == PREPARES and _is_late(state, change, event.at):
        problem = f"its ranks were not ready within {change.ready_seconds:g} s"
        state, actions = not_prepared(state, events.NotPrepared(event.at, problem, has_room=False))
    state, more = _heed(state, event)
    return state, [*actions, *more]


def _is_late(state: JobState, change: Change, now: float) -> bool:
    return state.prepared_since is not None and now - state.prepared_since > change.ready_seconds


def _heed(state: JobState, event: events.RanksSaid) -> Next:
    """Let the hosts leave on which SIGTERM has told a rank to end, if the job is healthy."""
    if state.is_ending or state.saves_for:
        return state, []
    told = {rank for rank, since in event.told.items() if since < event.at - SETTLE_SECONDS}
    new = {state.now_on.host_of(rank): rank for rank in sorted(told - state.heeded)}
    state = replace(state, told={**state.told, **new}, heeded=state.heeded | told)
    leave = [host for host in state.now_on.hosts if host in state.told]
    if not leave or state.change is not None:
        return state, []
    if state.run != FIRST_RUN and not event.told:  # since the attempt before; this one has not begun its run yet
        return state, []
    ranks = rank_ranges(sorted(state.told[host] for host in leave))
    why = f"SIGTERM told rank{'s' * (len(leave) > 1)} {ranks} to end"
    state = replace(state, told={host: rank for host, rank in state.told.items() if host not in leave})
    if state.run != FIRST_RUN:
        now = f"this is run {state.run}" if state.run else "there is none now"
        only = "the hosts of a job change in the first run of a Trainer, or loop with mt.keep, only"
        return state, [events.Refuse(), Say(f"{why}, and {only}; {now}. A failure follows")]
    why_end = f"{why} on {', '.join(leave)}"
    state, actions, says = _part(state, event, leave, why, why_end, READY_SECONDS_OF_TOLD)
    return state, [*actions, Say(says)]


def listed(state: JobState, event: events.Listed) -> Next:
    """The inventory was read: let hosts go that it has lost, or ask those that are due, if there is room."""
    state, says = _read(state, event)
    if not is_open(state):
        return state, says
    leave = [host for host in state.now_on.hosts if host in state.outside.dropped]
    if leave:
        why = "not in the inventory any more"
        why_end = f"{', '.join(leave)} can no longer take part ({why}), and {state.limits.words}"
        state, actions, text = _part(state, event, leave, why, why_end)
        return state, [*says, *actions, Say(text)]
    if len(state.now_on.hosts) >= (state.limits.max_nodes or 0):
        return state, says
    due, state, given_up = _due(state, event.at)
    return state, [*says, *given_up, *([events.AskHosts(tuple(due))] if due else [])]


def _read(state: JobState, event: events.Listed) -> Next:
    outside, hosts = state.outside, event.hosts
    if hosts is None:
        if event.fault in ("", outside.fault):
            return state, []
        says = f"the hosts of the job stay as they are, because the inventory cannot be read: {event.fault}"
        return replace(state, outside=replace(outside, fault=event.fault)), [Say(says)]
    # Hosts have perhaps left or joined, by the launcher before: what is read first is no news.
    known = frozenset(hosts) if outside.known is None else outside.known
    come = [host for host in hosts if host not in known]
    dropped = (outside.dropped | (known - set(hosts))) - set(hosts)
    outside = replace(
        outside,
        known=frozenset(hosts),
        new=tuple(dict.fromkeys([host for host in outside.new if host not in dropped] + come)),
        dropped=dropped,
        fault="",
        due=_less(outside.due, come),
    )
    return replace(state, outside=outside), []


def _due(state: JobState, now: float) -> tuple[list[str], JobState, list[Action]]:
    """Return the hosts that are to be asked now. Say once which ones are not asked any more."""
    outside, due, says = state.outside, [], list[Action]()
    for host in dict.fromkeys([*state.hosts.hosts, *outside.new]):
        if host in state.now_on.hosts or host in outside.dropped:
            continue
        times = times_bad(host, state.failures, state.absent)
        if len(times) >= MOST_TIMES_BAD:
            if host not in outside.given_up:
                outside = replace(outside, given_up=outside.given_up | {host})
                why = f"was found bad {len(times)} times, and is not taken in again by itself"
                says.append(Say(f"{host} {why}; `mpitrain scale JOB +HOST` lets it in"))
        elif now >= max(outside.due.get(host, 0.0), aside_until(times) if times else 0.0):
            due.append(host)
    return due, replace(state, outside=outside), says


def answered(state: JobState, event: events.Answered) -> Next:
    """Those that let us in join, as many as there is room for. The others are asked later."""
    state = _put_off(state, [host for host in event.asked if host not in event.inside], event.at)
    room = (state.limits.max_nodes or 0) - len(state.now_on.hosts)
    joining = [host for host in event.asked if host in event.inside][: max(0, room)]
    if not joining or not is_open(state):
        return state, []
    places = {place.host: place for place in state.hosts.places}
    text = ",".join(_as_text(host, places.get(host)) for host in joining)
    return state, [Find(text, state.attempt, state.now_on, state.hosts, by_itself=True)]


def noted(state: JobState, different: Mapping[str, str], now: float) -> JobState:
    """Take note that these hosts differ, each with the difference. They are asked again much later."""
    outside = state.outside
    due = {**outside.due, **dict.fromkeys(different, now + DIFFERENT_SECONDS)}
    return replace(state, outside=replace(outside, due=due, differences={**outside.differences, **different}))


def _put_off(state: JobState, hosts: Iterable[str], now: float) -> JobState:
    """These hosts do not answer: ask them later, each time after a longer time."""
    old = state.outside.waits
    waits = {host: min(2 * old.get(host, FIRST_SECONDS / 2), MOST_SECONDS) for host in hosts}
    due = {**state.outside.due, **{host: now + seconds for host, seconds in waits.items()}}
    return replace(state, outside=replace(state.outside, waits={**old, **waits}, due=due))


def taken_in(outside: Outside, hosts: Sequence[str]) -> Outside:
    """An attempt begins on these hosts: what they did before does not count."""
    waits, due = _less(outside.waits, hosts), _less(outside.due, hosts)
    return replace(outside, waits=waits, due=due, differences=_less(outside.differences, hosts))


def changed(state: JobState, hosts: Placement) -> JobState:
    """These are the hosts of the job from now on. A new one that has left is not asked."""
    gone = set(state.hosts.hosts) - set(hosts.hosts)
    new = tuple(host for host in state.outside.new if host not in gone)
    return replace(state, hosts=hosts, outside=replace(state.outside, new=new))


def _less(table: Mapping[str, float] | Mapping[str, str], hosts: Iterable[str]) -> dict[str, Any]:
    return {host: value for host, value in table.items() if host not in hosts}


def _as_text(host: str, place: Place | None) -> str:
    """Write a host as in --hosts."""
    return ",".join(f"{host}/{device}" for device in place.devices) if place and place.devices else host
