"""init and shutdown, and what exists between the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mpitrain
from mpitrain.horovod.exceptions import HorovodInternalError
from mpitrain.horovod.named_channel import NamedChannel
from mpitrain.horovod.process_sets import ProcessSet, add, global_process_set
from mpitrain.horovod.renewals import renewals
from mpitrain.torch.groups import world_of
from mpitrain.world import World


@dataclass
class State:
    """What init() has made.

    Attributes:
        world: the World of the job.
        make_channel: makes the channel of a process set; its ranks call this.
        channels: those that this rank is in, by number of the process set; 0: all ranks.
        sets: all process sets, by number.
        last_number: the number of the last process set.
    """

    world: World
    make_channel: Callable[[Sequence[int], str], NamedChannel]
    channels: dict[int, NamedChannel] = field(default_factory=dict)
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    last_number: int = 0


_state: State | None = None


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Begin. All ranks call this. A second call does nothing.

    Args:
        comm: None, or a communicator or list with all ranks of the job.
        process_sets: sets to add, the same on all ranks; "dynamic", as None: none yet.

    Raises:
        ValueError: `comm` has other ranks; or two process sets have the same ranks, or one has ranks that do not exist.
        HorovodInternalError: the ranks give different process sets.
        MpitrainError: the processes do not form one job; see mpitrain.init.
    """
    global _state  # noqa: PLW0603 - Horovod's interface has one state
    if _state is not None:
        return
    world = mpitrain.init()
    _check_comm(world, comm)
    state = State(world, _make_channel)
    ranks = list(range(world.size))
    state.channels[0] = _make_channel(ranks, "calls of all ranks")
    global_process_set.ranks = ranks
    global_process_set.bind(state, 0)
    state.sets[0] = global_process_set
    try:
        for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            add(state, process_set)
    except (ValueError, HorovodInternalError):
        _close(state)
        raise
    _state = state


def shutdown() -> None:
    """End, once the calls under way have ended. All ranks call this. init() may follow."""
    global _state
    state, _state = _state, None
    if state is not None:
        _close(state)


def renew() -> None:
    """Begin anew in the World that is left after a loss of ranks, if init() was called before. All its ranks call this.

    Process sets are dropped, because their ranks have other numbers now.
    """
    global _state  # noqa: PLW0603 - Horovod's interface has one state
    state, _state = _state, None
    if state is None:
        return
    _unbind(state)
    try:
        init()
    except BaseException:
        _state = state  # another rank is lost, and the next renewal begins again
        raise


renewals.append(renew)


def is_initialized() -> bool:
    """Return whether init() has been called, and shutdown() not since."""
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
    if not takes_part(process_set):
        raise ValueError(f"{current().world.name()}: a call in {process_set}, which this rank is not in")
    return current().channels[process_set.process_set_id]  # type: ignore[index]


def takes_part(process_set: ProcessSet) -> bool:
    """Return whether this rank is in a process set.

    Raises:
        ValueError: the set has not been added.
    """
    state = current()
    if process_set.process_set_id not in state.sets:
        raise ValueError(f"{state.world.name()}: {process_set} is not in use; call hvd.add_process_set first")
    return process_set.process_set_id in state.channels


def _make_channel(ranks: Sequence[int], name: str) -> NamedChannel:
    engine, world = world_of(ranks, name, math.inf)
    return NamedChannel(engine, world, name)


def _close(state: State) -> None:
    for channel in reversed(list(state.channels.values())):
        channel.close()
    _unbind(state)


def _unbind(state: State) -> None:
    for process_set in state.sets.values():
        process_set.bind(None, 0 if process_set is global_process_set else None)


def _check_comm(world: World, comm: Any) -> None:
    if comm is None:
        return
    given = sorted(comm) if isinstance(comm, Iterable) else list(range(comm.size))
    if given and given != list(range(world.size)):
        raise ValueError(
            f"{world.name()}: init(comm=) with {len(given)} of {world.size} ranks; the interface has all ranks of the "
            "job. Start a job with fewer ranks, or use a process set"
        )
