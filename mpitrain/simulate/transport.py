"""A communicator in simulated time, which allreduce algorithms take for MPI's, and arrays without contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from mpitrain.simulate.events import Events, Pending, SimulatedRank


class SimulatedComm:
    """What an algorithm uses of an MPI.Comm: its calls take the same arguments, and post messages in simulated time.

    Attributes:
        rank, size: as of an MPI.Comm.
    """

    def __init__(self, events: Events, rank: SimulatedRank, size: int) -> None:
        self.rank = rank.number
        self.size = size
        self._events = events
        self._own = rank

    def Isend(self, array: numpy.ndarray, target: int, tag: int) -> Pending:  # noqa: N802 - MPI's name
        """Post a message of as many bytes as `array` has."""
        return self._events.send(self._own, target, tag, array.nbytes)

    def Irecv(self, array: numpy.ndarray, source: int, tag: int) -> Pending:  # noqa: N802 - MPI's name
        """Post the receive of the next message from `source` with this tag; `array` has as many bytes."""
        return self._events.receive(self._own, source, tag, array.nbytes)


def without_contents(
    count: int, dtype: numpy.dtype, added: Callable[[int], None], copied: Callable[[int], None]
) -> numpy.ndarray:
    """Make a flat array for which additions and copies are only counted.

    It is one element, which stands for all. So it takes no memory, however long it is, and all ranks may share it.

    Args:
        count: elements.
        dtype: any.
        added, copied: called with the number of bytes that an addition or an assignment would write.
    """

    class WithoutContents(numpy.ndarray):
        """One element, again and again. Slices and views of it are of this class too."""

        def view(self, dtype: Any) -> WithoutContents:  # type: ignore[override]
            """As of an array whose elements lie side by side."""
            other = numpy.dtype(dtype)
            return of_one(self.nbytes // other.itemsize, other)

        def __array_ufunc__(self, ufunc: numpy.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
            (result,) = kwargs.get("out") or [one for one in inputs if isinstance(one, WithoutContents)][:1]
            added(result.nbytes)
            return result

        def __setitem__(self, key: Any, _value: Any) -> None:
            copied(self[key].nbytes)

    def of_one(count: int, dtype: numpy.dtype) -> WithoutContents:
        return WithoutContents((count,), dtype, bytearray(dtype.itemsize), 0, (0,))

    return of_one(count, dtype)
