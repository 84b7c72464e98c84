"""Shared by the tests of the policy: what it does after a sequence of events, as text."""

from __future__ import annotations

from typing import Any

from mpitrain.launch import events, policy
from mpitrain.launch.events import Action, Event, FailedAttempt, Find, JobState, Limits, Pause
from mpitrain.launch.kept import LEAVES, PREPARES, SAVES, STAYS
from mpitrain.launch.placement import Place, Placement

ADDRESSES = {host: f"10.0.0.{number}" for number, host in enumerate("abc", 1)}
ABC = Placement((Place("a", 0, 2), Place("b", 2, 1), Place("c", 3, 2)), ADDRESSES, "a")
COMMANDS = {STAYS: "stays", LEAVES: "leaves", SAVES: "saves", PREPARES: "prepares"}


def widen(placement: Placement, text: str) -> Placement:
    """The placement with the hosts of `text`, each with two ranks."""
    for host in (item.partition("/")[0] for item in text.split(",")):
        places = (*placement.places, Place(host, placement.num_ranks, 2))
        placement = Placement(places, {**placement.addresses, host: "10.0.0.9"}, placement.own)
    return placement


def names(placement: Placement) -> str:
    return "".join(placement.hosts)


def shown(state: JobState, action: Action) -> str:
    """An action in some words."""
    match action:
        case events.Start(takes_over=takes_over, pause=pause):
            saves = ", only to save" if pause is not None and pause.only_saves else ""
            return f"{'take over' if takes_over else 'start'} {names(state.now_on)}{saves}"
        case events.Prepare(where=where):
            return f"prepare {names(where)}"
        case events.Tell(command=command):
            return f"tell: {COMMANDS[command]}"
        case events.Say(text=text):
            return f"say: {text}"
        case events.Reply(text=text, is_accepted=is_accepted):
            return f"{'accepted' if is_accepted else 'refused'}: {text}"
        case events.Find(text=text):
            return f"find {text}"
        case events.AskHosts(hosts=hosts):
            return f"ask {''.join(hosts)}"
        case events.LeaveState():
            return "leave the state"
        case events.End(code=code, is_error=is_error):
            return "raise the error" if is_error else f"end {code}"
    return type(action).__name__.lower()


class History:
    """A job, from its start on. `take` returns what is done after an event."""

    def __init__(self, limits: Limits, hosts: Placement = ABC, pause: Pause | None = None) -> None:
        self.state = policy.begin(limits, hosts, pause)
        self.actions: list[Action] = []

    def take(self, event: Event) -> list[str]:
        self.state, self.actions = policy.next(self.state, event)
        return [shown(self.state, action) for action in self.actions]

    def train(self, at: float = 0.0) -> History:
        """An attempt begins, and its ranks copy their state."""
        if not self.state.is_running:
            self.take(events.JobBegun(at))
        self.take(events.RanksSaid(at, 1))
        return self

    def fit(self, at: float = 0.0, own_run: int = 1) -> list[str]:
        """The hosts that the policy wants to find are found, and fit."""
        find = next(action for action in self.actions if isinstance(action, Find))
        wider = widen(find.now_on, find.text)
        joined = set(wider.hosts) - set(find.now_on.hosts)
        return self.take(events.Fit(at, find, wider, widen(find.hosts.without(joined), find.text)))

    def join(self, host: str, at: float = 0.0) -> list[str]:
        """Somebody asks a host to join, which is fit."""
        self.take(events.JoinAsked(at, host))
        return self.fit(at)


def transcript(limits: Limits, *happens: Event | str, hosts: Placement = ABC, pause: Pause | None = None) -> str:
    """What is done after these events, one line each. A text is a host that is asked to join, and fit."""
    history, lines = History(limits, hosts, pause), list[str]()
    first = () if happens and isinstance(happens[0], events.JobBegun) else (events.JobBegun(0.0),)
    for event in (*first, *happens):
        lines += history.join(event) if isinstance(event, str) else history.take(event)
    return "\n".join([*lines, ""])


def killed(rank: int, step: int, code: int = 137, *, at: float = 0.0, has_checkpoint: bool = False) -> events.Failed:
    """A rank is killed in this step."""
    host = ABC.host_of(rank)
    failure = FailedAttempt(f"rank {rank} on {host} was killed by signal 9", code, at, 1, step, host, failed_at=at)
    return events.Failed(at, failure, has_checkpoint)


def early(rank: int, host: str) -> events.Failed:
    """A rank fails before its first step."""
    return events.Failed(0.0, FailedAttempt(f"rank {rank} on {host} failed: OSError: x", 1, 0.0, host=host))


def lost(*hosts: str, step: int | None = 7, first: int | None = 1, at: float = 0.0) -> events.Failed:
    """Hosts fall silent."""
    cause = f"{' and '.join(hosts)} fell silent"
    return events.Failed(at, FailedAttempt(cause, 1, at, first, step, None, hosts, at))


def left(step: int, **about: Any) -> events.Left:
    return events.Left(0.0, step, 1.0, **about)


def absent(*hosts: str, at: float = 0.0, **different: str) -> events.NotStarted:
    """An attempt cannot start."""
    return events.NotStarted(at, "they differ" if different else "no answer", hosts, different)


def said(at: float = 0.0, *told: int, run: int = 1, is_ending: bool = False, since: float = -9.0) -> events.RanksSaid:
    """The ranks of an attempt train; SIGTERM has told some of them to end, some time ago."""
    return events.RanksSaid(at, run, is_ending, dict.fromkeys(told, since))


def answers(at: float, asked: str, inside: str) -> tuple[events.Answered]:
    """Of the hosts that were asked, some answer."""
    return (events.Answered(at, tuple(asked), frozenset(inside)),)
