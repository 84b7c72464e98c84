"""init and shutdown; process sets, which are ranks that make named calls among themselves; the start of a call.

Two process sets may have ranks in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mpitrain
from mpitrain.arguments import shortened
from mpitrain.errors import HorovodInternalError
from mpitrain.horovod.named_call import NamedCall
from mpitrain.horovod.named_channel import NamedChannel
from mpitrain.horovod.negotiation import JOIN
from mpitrain.torch.groups import world_of
from mpitrain.world.world import World

__all__ = [
    "ProcessSet",
    "add_process_set",
    "barrier",
    "global_process_set",
    "init",
    "is_initialized",
    "join",
    "remove_process_set",
    "shutdown",
]


class ProcessSet:
    """Some ranks of the job.

    Attributes:
        process_set_id: the number of the set, the same on every rank; None before it is added, and after its removal.
        ranks: the ranks in the job, in ascending order.
        channel: has the calls of the set, once it is added, on its ranks.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """
        Args:
            ranks: ranks of the job, in any order.

        Raises:
            ValueError: `ranks` are not whole numbers.
        """
        if not isinstance(ranks, Iterable):
            raise ValueError(f"ProcessSet takes a list of ranks of the job, not {type(ranks).__name__}")
        self.ranks: list[int] = sorted(ranks)
        if any(type(rank) is not int for rank in self.ranks):
            raise ValueError(f"ProcessSet takes a list of ranks of the job, not {self.ranks}")
        self.process_set_id: int | None = None
        self.channel: NamedChannel | None = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def size(self) -> int | None:
        """Return the number of ranks in the set; None if it has not been added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the number of this rank in the set; None if the set has not been added, or lacks this rank."""
        return None if self.channel is None else self.channel.world.rank

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if it has not been added."""
        if self.channel is not None:
            return True
        return False if self.process_set_id else None  # 0: the set of all ranks, before init()


# The set of all ranks, in which calls are made by default.
global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


@dataclass
class State:
    """The objects that init() has made.

    Attributes:
        world: the World of the job.
        sets: all process sets, by number; 0: all ranks.
        last_number: the number of the last process set.
    """

    world: World
    sets: dict[int, ProcessSet]
    last_number: int = 0


_state: State | None = None


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Initialise the interface. All ranks call this. A second call does nothing.

    Args:
        comm: None, or a communicator or list with all ranks of the job.
        process_sets: sets to add, the same on all ranks; "dynamic", as None: none yet.

    Raises:
        ValueError: `comm` does not have all ranks of the job; or two process sets have the same ranks, or one has ranks
            that do not exist.
        HorovodInternalError: the ranks give different process sets.
        MpitrainError: the processes do not form one job; see mpitrain.init.
    """
    global _state  # noqa: PLW0603 - Horovod's interface has one state
    if _state is not None:
        return
    world = mpitrain.init()
    _check_comm(world, comm)
    ranks = list(range(world.size))
    global_process_set.channel = _make_channel(ranks, "calls of all ranks")
    global_process_set.ranks = ranks
    _state = State(world, {0: global_process_set})
    try:
        for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            add_process_set(process_set)
    except (ValueError, HorovodInternalError):
        shutdown()
        raise
    except BaseException:
        _state = None  # for example of a lost rank, with which nothing can be closed
        raise


def shutdown() -> None:
    """Shut down, once the calls under way have ended. All ranks call this. init() may be called again."""
    global _state
    state, _state = _state, None
    if state is not None:
        for process_set in reversed(state.sets.values()):
            if process_set.channel is not None:
                process_set.channel.close()
        _forget(state)


def renew() -> None:
    """If init() was called before, initialise again in the World that remains after a loss. All its ranks call this.

    Process sets are dropped, because their ranks have other numbers now.
    """
    global _state  # noqa: PLW0603 - Horovod's interface has one state
    state, _state = _state, None
    if state is None:
        return
    _forget(state)
    try:
        init()
    except BaseException:
        _state = state  # another rank is lost, and the next renewal begins again
        raise


def is_initialized() -> bool:
    """Return whether init() has been called, without shutdown() since then."""
    return _state is not None


def current() -> State:
    """Return the state.

    Raises:
        ValueError: init() has not been called.
    """
    if _state is None:
        raise ValueError("Horovod's interface has not been initialized; call hvd.init() first, on all ranks")
    return _state


def channel_of(process_set: ProcessSet) -> NamedChannel:
    """Return the channel of a process set.

    Raises:
        ValueError: the set has not been added, or this rank is not in it.
    """
    channel = _added(process_set).channel
    if channel is None:
        raise ValueError(f"{current().world.name()}: a call in {process_set}, which this rank is not in")
    return channel


def takes_part(process_set: ProcessSet) -> bool:
    """Return whether this rank is in a process set.

    Raises:
        ValueError: the set has not been added.
    """
    return _added(process_set).channel is not None


def _added(process_set: ProcessSet) -> ProcessSet:
    state = current()
    if process_set.process_set_id not in state.sets:
        raise ValueError(f"{state.world.name()}: {process_set} is not in use; call hvd.add_process_set first")
    return state.sets[process_set.process_set_id]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. All ranks of the job call this, in the same order, with the same ranks.

    Returns:
        The set. Ranks of the set can make calls in it.

    Raises:
        ValueError: a set with these ranks exists, or one of the ranks does not. Raised on every rank.
        HorovodInternalError: the ranks add different sets. Raised on every rank.
    """
    state = current()
    with refused_by_all("add_process_set", None, global_process_set):
        added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    submit("add_process_set", None, global_process_set, lambda call: call.tell(f"ranks {added.ranks}")).ended()
    size = state.world.size
    if not added.ranks or added.ranks != sorted(set(added.ranks)) or not 0 <= added.ranks[0] <= added.ranks[-1] < size:
        raise ValueError(
            f"{state.world.name()}: a process set of ranks {added.ranks}; give at least one rank, each once, of 0 to "
            f"{size - 1}"
        )
    same = next((one for one in state.sets.values() if one.ranks == added.ranks), None)
    if same is not None:
        raise ValueError(f"{state.world.name()}: a process set of ranks {added.ranks} exists already: {same}; use that")
    state.last_number += 1
    if state.world.rank in added.ranks:
        added.channel = _make_channel(added.ranks, f"process set {state.last_number}")
    state.sets[state.last_number], added.process_set_id = added, state.last_number
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, once its calls have ended. All ranks of the job call this, in the same order.

    Returns:
        Whether the set was there. The set of all ranks cannot be removed.
    """
    state, number = current(), process_set.process_set_id
    if not number:
        return False
    submit("remove_process_set", None, global_process_set, lambda call: call.tell(f"number {number}")).ended()
    removed = state.sets.pop(number)
    if removed.channel is not None:
        removed.channel.close()
    process_set.process_set_id = process_set.channel = None
    return True


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a set have made this call."""
    submit("barrier", None, process_set, hurries=False).ended()


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's scripts give it
    """Declare that this rank has no more data. It contributes zeros to the others' allreduces until all have joined.

    Args:
        device: ignored; a rank that has joined works on the CPU.

    Returns:
        The rank that joined last.
    """
    channel = channel_of(global_process_set)
    call = channel.submit(NamedCall(channel, JOIN), hurries=False)
    call.ended()
    for steps in channel.steps:
        steps.forget(rates=True)  # a schedule may count the steps that a rank has made
    return call.details[0][0]


def submit(
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    make: Callable[[NamedCall], object] = lambda _: None,
    *,
    hurries: bool = True,
) -> NamedCall:
    """Submit a call that `make` defines. If it cannot be made, the call fails on all ranks.

    Args:
        kind, name: they match the calls of the ranks. None: the number of the call among those of its kind without a
            name.
        process_set: its ranks make the call.
        make: sets the attributes of the call.
        hurries: see NamedChannel.submit; False if the caller will wait at once, and so drive the call itself.

    Raises:
        TypeError, ValueError, HorovodInternalError: the call cannot be made. The text has the rank and the key.
    """
    channel = channel_of(_set_of(process_set))
    name = channel.numbered(kind) if name is None else name
    call = NamedCall(channel, f"{kind}.{name}")
    with refused_by_all(kind, name, process_set):
        if not isinstance(process_set, ProcessSet):
            raise TypeError(f"process_set={shortened(process_set)}; give what hvd.add_process_set has returned")
        make(call)
    return channel.submit(call, hurries=hurries)


@contextmanager
def refused_by_all(kind: str, name: str | None, process_set: ProcessSet) -> Iterator[None]:
    """Run a block that prepares a call of this kind and name. If it fails, the call fails on all ranks."""
    try:
        yield
    except Exception as error:
        channel = channel_of(_set_of(process_set))
        key = f"{kind}.{channel.numbered(kind) if name is None else name}"
        if isinstance(error, TypeError | ValueError | HorovodInternalError):
            error = type(error)(f"{channel.world.name()}: {key}: {error}")
        channel.refuse(key, error)


def _set_of(process_set: Any) -> ProcessSet:
    """The set in which a call is refused if its argument is not a process set."""
    return process_set if isinstance(process_set, ProcessSet) else global_process_set


def _make_channel(ranks: Sequence[int], name: str) -> NamedChannel:
    engine, world = world_of(ranks, name, math.inf)
    return NamedChannel(engine, world, name)


def _forget(state: State) -> None:
    for process_set in state.sets.values():
        process_set.process_set_id = process_set.channel = None
    global_process_set.process_set_id = 0


def _check_comm(world: World, comm: Any) -> None:
    if comm is None:
        return
    given = sorted(comm) if isinstance(comm, Iterable) else list(range(comm.size))
    if given and given != list(range(world.size)):
        raise ValueError(
            f"{world.name()}: init(comm=) with {len(given)} of {world.size} ranks; the interface has all ranks of the "
            "job. Start a job with fewer ranks, or use a process set"
        )
