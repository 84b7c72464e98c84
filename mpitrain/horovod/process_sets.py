"""Process sets: some ranks of the job that make named calls among themselves. Two sets may have ranks in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mpitrain.horovod import operations
from mpitrain.horovod.named_channel import NamedChannel
from mpitrain.horovod.waits import ended

if TYPE_CHECKING:
    from mpitrain.horovod.state import State


class ProcessSet:
    """Some ranks of the job.

    Attributes:
        process_set_id: the number of the set, the same on every rank; None before it is added, and after its removal.
        ranks: the ranks in the job, in ascending order.
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
        self._state: State | None = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def size(self) -> int | None:
        """Return the number of ranks in the set; None if it has not been added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the number of this rank in the set; None if the set has not been added, or lacks this rank."""
        if self._state is None or self._state.world.rank not in self.ranks:
            return None
        return self.ranks.index(self._state.world.rank)

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if it has not been added."""
        return None if self._state is None else self._state.world.rank in self.ranks

    def bind(self, state: State | None, number: int | None) -> None:
        """Note that the set has been added under this number, or removed."""
        self._state, self.process_set_id = state, number


# The set of all ranks, in which calls are made by default.
global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add(state: State, process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. All ranks of the job call this, in the same order, with the same ranks.

    Returns:
        The set. Ranks of the set can make calls in it.

    Raises:
        ValueError: a set with these ranks exists, or one of the ranks does not. On every rank.
        HorovodInternalError: the ranks add different sets. On every rank.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    channel = state.channels[0]
    ended(channel.submit(operations.barrier(channel, channel.key("add_process_set", None), [f"ranks {added.ranks}"])))
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
    number = state.last_number
    if state.world.rank in added.ranks:
        state.channels[number] = state.make_channel(added.ranks, f"process set {number}")
    state.sets[number] = added
    added.bind(state, number)
    return added


def remove(state: State, process_set: ProcessSet) -> bool:
    """Remove a process set, once its calls have ended. All ranks of the job call this, in the same order.

    Returns:
        Whether the set was there. The set of all ranks cannot be removed.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    channel = state.channels[0]
    ended(channel.submit(operations.barrier(channel, channel.key("remove_process_set", None), [f"number {number}"])))
    of_set: NamedChannel | None = state.channels.pop(number, None)
    if of_set is not None:
        of_set.close()
    del state.sets[number]
    process_set.bind(None, None)
    return True
