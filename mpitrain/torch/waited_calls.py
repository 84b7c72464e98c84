"""Calls that are not compared before they begin: if one waits for long, the ranks tell each other which call it is.

Calls that no later comparison covers are compared when all ranks have finished.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from mpitrain.errors import MismatchError
from mpitrain.waiting.notes import as_numbers
from mpitrain.watching.activity import own_activity

if TYPE_CHECKING:
    from mpitrain.torch.work import Call
    from mpitrain.world.world import World

# A rank's report: its number, the number of a call in the group, and a description of that call.
Word: TypeAlias = tuple[int, int, str]
_KEPT = 256  # how many calls a rank remembers; a rank that has finished its part may be many calls ahead
_SECONDS = 10.0  # if there are no settings
_NAP_SECONDS = 1e-3


class WaitedCalls:
    """The calls of one group that were not compared."""

    def __init__(self, world: World, group: str) -> None:
        """`group` is its name, the same on all its ranks."""
        self._world = world
        self._uncompared: dict[int, str] = {}  # by number
        # Successive groups may have the same name. Positive numbers belong to models.
        final = world.control.notes.final
        self._number = -1 - zlib.crc32(f"{group} of {world.control.members}".encode())
        while self._number in final:
            self._number -= 1
        final[self._number] = partial(_at_the_end, group, self._uncompared)
        self._texts: dict[int, str] = {}  # by number
        self._told = 0  # the number of the last call that this rank has reported
        self._open: list[Word] = []  # reports about calls that this rank has yet to begin

    @property
    def num_uncompared(self) -> int:
        """How many calls have begun since the last comparison."""
        return len(self._uncompared)

    def take(self) -> list[str]:
        """Return the descriptions of the calls since the last comparison, to be compared now."""
        calls = list(self._uncompared.values())
        self._uncompared.clear()
        return calls

    def close(self, *, is_broken: bool) -> None:
        """Defer the remaining comparisons to the end of the program; none for a group that is broken.

        In a group whose last calls were compared, another rank may have made one more call.
        """
        if is_broken or not self._texts:
            self._world.control.notes.final.pop(self._number, None)

    def begun(self, number: int, text: str) -> None:
        """Note a call that begins."""
        self._texts[number] = self._uncompared[number] = text
        if len(self._texts) > _KEPT:
            del self._texts[next(iter(self._texts))]

    def tell(self, number: int) -> None:
        """Tell the other ranks what a call of this rank is."""
        self._told = number
        world = self._world
        world.control.notes.say((world.control.number, number, self._texts[number]), world.control.members)

    def ask(self, call: Call, error: Exception) -> Iterator[float]:
        """After an error on this rank alone, wait for the others' reports of the call, which then ends in `look`.

        MPI refuses a message that does not fit on its receiver alone, and does not tell which call sent it.
        """
        from mpi4py import MPI

        is_of_sizes = isinstance(error, MPI.Exception) and error.Get_error_class() in (MPI.ERR_TRUNCATE, MPI.ERR_OTHER)
        if call.number in self._texts and is_of_sizes:
            self.tell(call.number)
            deadline = time.monotonic() + _patience()
            while not call.is_done and time.monotonic() < deadline:
                yield _NAP_SECONDS

    def look(self, heard: Iterable[Word], call: Call | None, now: float) -> None:
        """Compare the other ranks' reports, and report `call`, the first one under way, if it waits for long.

        Raises:
            MismatchError: a rank has made another call. The others that wait raise it too, each by itself.
        """
        world = self._world
        is_new = call is not None and call.number in self._texts and call.number != self._told
        if call is not None and is_new and now - (call.deadline - call.seconds) > _patience():
            self.tell(call.number)
        for word in [*self._open, *heard]:
            rank, number, text = word
            if number > world.control.calls and word not in self._open:
                self._open.append(word)
            elif number <= world.control.calls and word in self._open:
                self._open.remove(word)
            own = self._texts.get(number, text)
            if own != text:
                # To all ranks: others may know of neither call, and this rank sends no further report.
                self.tell(number)
                there = world.control.members.index(rank)
                raise MismatchError(
                    f"{world.name(there)}: {text}; {world.name()}: {own}; do all ranks make the same calls in the same "
                    f"order? Call {number} of the group, which is not among those compared before they begin"
                )


def _at_the_end(group: str, calls: dict[int, str]) -> tuple[float, ...]:
    lines = [f"call {number} is {' '.join(text.split())}" for number, text in calls.copy().items()]
    return as_numbers("\n".join([group, *lines]))


def _patience() -> float:
    """The seconds after which waiting ranks tell each other which call they are in."""
    activity = own_activity()
    if activity is None:
        return _SECONDS
    return min(activity.stall_seconds, activity.hang_seconds / 2) if activity.hang_seconds else activity.stall_seconds
