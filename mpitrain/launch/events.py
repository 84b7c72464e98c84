"""The types of the policy (policy.py): the state of a job, the events that happen to it, and the actions that follow.

Events have their time, by a clock that does not go back. Nothing here has a clock of its own, or acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpitrain.launch.kept import STAYS
from mpitrain.launch.placement import Placement

DEFAULT_RESTARTS = 3
# The ranks of the next attempt must be ready within this time, or the present ones end first.
READY_SECONDS = 120.0


@dataclass(frozen=True)
class Limits:
    """How often a job may be started again, and on how many hosts.

    Attributes:
        restarts: after failures, at most. None: DEFAULT_RESTARTS if an attempt has taken a checkpoint, in memory or on
            disk, or resumed from one; else 0.
        min_nodes: the fewest hosts.
        max_nodes: the most hosts of an elastic job, which takes hosts in by itself; None: those that it has.
        counts_steps: a failure has a step, so one that would come again can be told. False: a script for torchrun,
            which has no mt.Trainer and no mt.keep, and resumes from checkpoints of its own.
    """

    restarts: int | None = 0
    min_nodes: int = 1
    max_nodes: int | None = None
    counts_steps: bool = True

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
class Pause:
    """Why training is paused when an attempt begins."""

    cause: str  # in a line
    step: int | None  # the first step that is missing; None: all are
    since: float  # when it stopped
    only_saves: bool = False  # the attempt makes no step; it only saves


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt that failed."""

    cause: str  # in a line
    code: int  # its exit code
    when: float  # the time of its end
    first: int | None = None  # the first step that it began; None: it began none
    step: int | None = None  # the step in which it failed; None: before its first
    host: str | None = None  # of the rank that failed first, if known
    lost: tuple[str, ...] = ()  # the hosts that fell silent
    failed_at: float = 0.0  # the time of the first end of a rank, if known; else `when`


@dataclass(frozen=True)
class Change:
    """A change of the hosts that was accepted."""

    text: str  # as in "node2 leaves"
    hosts: Placement  # those of the job from now on, with those that are set aside
    now_on: Placement  # where the next attempt runs
    joined: tuple[str, ...] = ()  # the hosts that come in with it
    is_end: bool = False  # too few hosts would be left, so the ranks save, and the job ends
    ready_seconds: float = READY_SECONDS  # within this time the ranks of the next attempt must be ready


@dataclass(frozen=True)
class Outside:
    """What an elastic job knows of the hosts that do not take part."""

    known: frozenset[str] | None = None  # what the inventory had when it was read last; None: it never was
    new: tuple[str, ...] = ()  # the hosts that it has got since the start, in order
    dropped: frozenset[str] = frozenset()  # those that it has lost since the start
    fault: str = ""  # why it cannot be read
    waits: Mapping[str, float] = field(default_factory=dict)  # the last wait of a host that did not answer, in seconds
    due: Mapping[str, float] = field(default_factory=dict)  # when to ask
    differences: Mapping[str, str] = field(default_factory=dict)  # of hosts that answer and cannot take part
    given_up: frozenset[str] = frozenset()  # the hosts that are not asked any more


@dataclass(frozen=True)
class LostWait:
    """A wait, without an attempt, for hosts that were just lost: too few are left."""

    present: frozenset[str]  # the hosts that can take part
    until: float
    asked: float  # when the others were asked last whether they answer


@dataclass(frozen=True)
class JobState:
    """What is known of a job and its hosts, from its start to its end."""

    limits: Limits
    hosts: Placement  # all hosts of the job, with those that are set aside
    now_on: Placement  # where the present attempt runs
    pause: Pause | None = None  # what ended the attempt before; None: there was none from which this one continues
    has_trained: bool = False  # an attempt before made steps
    has_checkpoint: bool = False  # an attempt has taken a checkpoint, or resumed from one
    holders: frozenset[str] = frozenset()  # the hosts that have the state in memory
    failures: tuple[FailedAttempt, ...] = ()
    absent: tuple[tuple[float, str], ...] = ()  # the hosts that could not take part, each with the time
    attempt: int = 0  # the number of the present attempt, from 1; one that follows a change of hosts counts too
    is_running: bool = False
    saves_for: str = ""  # why the present attempt is there only to save; "": it trains
    joining: Change | None = None  # the change with which hosts have joined, until the attempt has made a step
    before: tuple[Placement, Placement] | None = None  # hosts and now_on before the last change
    change: Change | None = None  # what was accepted, and has not been made yet
    command: int = STAYS  # what the ranks are told (kept.py)
    prepared_since: float | None = None  # an attempt is being prepared beside the present one; None: none is
    run: int = 0  # the number of the run (of a Trainer, or loop with mt.keep) whose state all ranks copy; 0: none now
    is_ending: bool = False  # the attempt fails, or a signal to the launcher ends it
    told: Mapping[str, int] = field(default_factory=dict)  # hosts that must leave: SIGTERM has told this rank to end
    heeded: frozenset[int] = frozenset()  # the ranks of this attempt of which that is known
    outside: Outside = field(default_factory=Outside)
    waiting: LostWait | None = None  # too few hosts are left, and the job waits for others
    wait_until: float | None = None  # when waits since the last step that was made end; None: there was none
    saved_code: int = 0  # of a job that was told to save and to end; 0: that of its last failure

    @property
    def is_elastic(self) -> bool:
        """True if the job takes hosts in by itself."""
        return self.limits.max_nodes is not None


@dataclass(frozen=True)
class Event:
    """An event, with its time."""

    at: float


@dataclass(frozen=True)
class JobBegun(Event):
    """A launcher has the job. If its state has a pause, another launcher had it before."""

    silent: tuple[str, ...] = ()  # the hosts that do not answer now


@dataclass(frozen=True)
class Done(Event):
    """All ranks have come to the end of their program."""

    code: int = 0  # the exit code; not 0 if the time of the job was up: the training is saved, but not complete


@dataclass(frozen=True)
class Interrupted(Event):
    """A signal to the launcher has ended the attempt."""

    code: int


@dataclass(frozen=True)
class Failed(Event):
    """The attempt has failed."""

    failure: FailedAttempt
    has_checkpoint: bool = False


@dataclass(frozen=True)
class Left(Event):
    """All ranks have ended after a step, because the hosts change, or the state is saved."""

    step: int
    since: float
    told: tuple[int, ...] = ()  # the ranks that SIGTERM had told to end
    is_ready: bool = False  # the next attempt, which was prepared, can take over


@dataclass(frozen=True)
class NotStarted(Event):
    """The attempt could not start."""

    problem: str
    away: tuple[str, ...] = ()  # the hosts that do not answer
    different: Mapping[str, str] = field(default_factory=dict)  # those that answer, and cannot take part, each with why


@dataclass(frozen=True)
class RanksSaid(Event):
    """What the ranks of the attempt say, some times a second."""

    run: int
    is_ending: bool = False
    told: Mapping[int, float] = field(default_factory=dict)  # the ranks that SIGTERM told to end, each with the time


@dataclass(frozen=True)
class Ready(Event):
    """All ranks of the next attempt wait for those before them to leave."""


@dataclass(frozen=True)
class NotPrepared(Event):
    """The next attempt cannot take over."""

    problem: str = ""  # "": no attempt can start beside this one
    faulty: tuple[str, ...] = ()  # the hosts because of which it cannot, as far as is known
    has_room: bool = True  # it is not for want of memory


@dataclass(frozen=True)
class LeaveAsked(Event):
    """Somebody asks hosts to leave."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class JoinAsked(Event):
    """Somebody asks the hosts of `text`, in the form of --hosts, to join, and others to leave at the same time."""

    text: str
    leave: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fit(Event):
    """The hosts that would join can take part: the job would run on `wider`, and have `hosts`."""

    find: Find
    wider: Placement
    hosts: Placement


@dataclass(frozen=True)
class Unfit(Event):
    """The hosts that would join cannot."""

    find: Find
    problem: str
    away: tuple[str, ...] = ()
    different: Mapping[str, str] = field(default_factory=dict)  # as in NotStarted; if both are empty, all of them


@dataclass(frozen=True)
class Listed(Event):
    """The inventory of an elastic job was read."""

    hosts: tuple[str, ...] | None  # None: it has no inventory, or `fault` says why it cannot be read
    fault: str = ""


@dataclass(frozen=True)
class Answered(Event):
    """Of the hosts that were asked, these let this machine log in."""

    asked: tuple[str, ...]
    inside: frozenset[str]


@dataclass(frozen=True)
class Waited(Event):
    """The job still waits for hosts. This comes some times a second."""


@dataclass(frozen=True)
class StopAsked(Event):
    """Somebody asks a job that waits for hosts to save its state and to end, with this exit code; 0: that of the
    failure."""

    code: int = 0


@dataclass(frozen=True)
class Action:
    """An action to be taken."""


@dataclass(frozen=True)
class Start(Action):
    """An attempt begins, on the hosts that JobState.now_on names. No other one runs or is prepared, but this one."""

    hosts: Placement
    pause: Pause | None
    takes_over: bool  # it was prepared


@dataclass(frozen=True)
class Wait(Action):
    """No attempt follows now: send `Waited` until something else does."""


@dataclass(frozen=True)
class Prepare(Action):
    """Start the next attempt beside the present one."""

    where: Placement
    cause: str


@dataclass(frozen=True)
class Drop(Action):
    """End the attempt that is prepared."""


@dataclass(frozen=True)
class Tell(Action):
    """Tell the ranks a command (kept.py)."""

    command: int


@dataclass(frozen=True)
class Refuse(Action):
    """Ranks that were told to end cannot leave, and so end at once."""


@dataclass(frozen=True)
class Say(Action):
    """Say this to the user."""

    text: str


@dataclass(frozen=True)
class Reply(Action):
    """Answer the request."""

    text: str
    is_accepted: bool = False


@dataclass(frozen=True)
class Find(Action):
    """Find out where the job would run with more hosts, and whether these can take part."""

    text: str  # the hosts, in the form of --hosts
    attempt: int  # which they would join
    now_on: Placement  # where it runs
    hosts: Placement  # all of the job
    by_itself: bool = False  # nobody has asked for it


@dataclass(frozen=True)
class AskHosts(Action):
    """See which of these hosts let this machine log in."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class LeaveState(Action):
    """Leave the state to the keepers, for another launcher."""

    why: str


@dataclass(frozen=True)
class End(Action):
    """The job is over."""

    code: int  # its exit code
    reason: str = ""  # who or what ended it; "": it has done its work
    is_error: bool = False  # the error is raised with which the last attempt did not start
