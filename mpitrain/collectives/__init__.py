"""Collective calls on arrays that return a handle at once. `world.sum` and its like are the simpler way.

    handle = mt.collectives.allgather(world, x)     every rank, the same calls in the same order
    ...                                             compute; other calls of the world
    everything = handle.wait()

These rules hold for all calls:

- If the ranks disagree (on call, dtype, shape or root), all of them get a MismatchError from `test` or `wait`.
- If a rank cannot make a call, for example with an array of Python objects, all ranks get that rank's error: the rank
  itself at once, the others from `test` or `wait`.
- Arrays are NumPy or CuPy arrays of any dtype except Python objects. Arrays that are summed have one of DTYPES.
- The call does not change an array. The program must not change it until the handle is done. A call that sums copies
  its array first, and so does a call with a host array that is not contiguous. All other arrays are sent from where
  they are. Results are new arrays. Those for CuPy arrays are on the current device.
- Calls run one after the other, in the order in which they began, on a communicator of their own. They may overlap with
  other calls of the World and with a step of a GradientReducer. A program may wait for handles in any order.
- A call makes progress in `test` and `wait` of any handle, and more slowly in every other wait of the World. A call
  whose handle is dropped still takes part, and ends when the program does at the latest.

p is the number of ranks, N the bytes of the largest array. All calls go through the ranks in rank order, in pieces of
at most 256 KiB, four at a time:

    call              how (mpitrain/allreduce, mpitrain/collectives/moves.py)          bytes sent by a rank
    reduce_scatter    that of the algorithm direct                                  (p-1)/p N
    allgather         that of the algorithm direct                                  p-1 times its own
    allreduce         direct; to 64 KiB recursive_doubling                          2(p-1)/p N; log2 p N
    alltoall          directly, the nearest ranks first                             what it was given
    broadcast         along a chain; to 64 KiB MPI's own                            N

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, Int. J. High
Perform. Comput. Appl. 19 (2005) 49-66 (pairwise exchange).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import DTYPES
from mpitrain.allreduce.group import Group
from mpitrain.arrays import Array, check_class, is_array, is_device_array, like
from mpitrain.collectives import moves
from mpitrain.errors import ConfigError, TreeError
from mpitrain.waiting.agreement import Agreement
from mpitrain.waiting.background import Background, Begun, Result
from mpitrain.waiting.control import until
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

__all__ = ["Handle", "allgather", "allreduce", "alltoall", "broadcast", "reduce_scatter"]

# The call itself, which starts from all ranks' records: yields while it has to wait, and returns its result.
Work = Callable[[numpy.ndarray], Generator[float | None, None, Result]]


T = TypeVar("T")

# The key is what the calls of a world share, and the function that made them.
_made: WeakKeyDictionary[Background, dict[Callable[[Group], Any], Any]] = WeakKeyDictionary()


class Handle(Begun[Result]):
    """A collective call that has begun."""

    def __init__(
        self,
        world: World,
        operation: str,
        kind: str,
        work: Work[Result],
        first_dimension: int = 0,
        *,
        anywhere: bool = False,
    ) -> None:
        self._text = f"{operation} of {kind}"
        agreement = world.begin_agreement(operation, [kind], detail=first_dimension, anywhere=anywhere)
        super().__init__(world.background, _agreed(agreement, work))

    def __str__(self) -> str:
        return self._text

    def wait(self) -> Result:
        """Wait for the call to end, and return its result.

        Raises:
            MismatchError: the ranks disagree. Raised on every rank, names the first difference. `test` raises it too.
        """
        return self._drive()


def _agreed(agreement: Agreement, work: Work[Result]) -> Generator[float | None, None, Result]:
    yield from until(agreement.test)
    return (yield from work(agreement.records))


def reduce_scatter(world: World, array: Array) -> Handle[Array]:
    """Begin to sum an array over ranks. The result is this rank's part of the sum along the first dimension.

    Args:
        world: every rank of it must make the call.
        array: has one of DTYPES and at least one dimension. Shape and dtype are equal on all ranks. Integers wrap.

    Returns:
        A handle. Its result has the dtype of `array`, and the same shape except for the first dimension, where it is
        the part that `mpitrain.world.shard.part_of` gives to this rank.

    Raises:
        TreeError: `array` is not such an array.
    """
    with _refused_by_all(world, "reduce_scatter"):
        host_array = _on_host(array, "reduce_scatter", sums=True, dimensions=1)

    def work(_: numpy.ndarray) -> Generator[float | None, None, Array]:
        flat = host_array.reshape(-1).copy()
        rows = [part_of(len(host_array), rank, world.size) for rank in range(world.size)]
        row = flat.size // len(host_array) if len(host_array) else 0
        yield from _made_once(world, ALGORITHMS["direct"].reduce_scatter)(
            flat, [(part.stop - part.start) * row for part in rows]
        )
        own = rows[world.rank]
        result = flat[own.start * row : own.stop * row].reshape(own.stop - own.start, *host_array.shape[1:]).copy()
        return like(result, array)

    return Handle(world, "collectives.reduce_scatter", f"{host_array.dtype} {host_array.shape}", work)


def allgather(world: World, array: Array) -> Handle[Array]:
    """Begin to join the arrays of all ranks, in rank order along the first dimension, on every rank.

    Args:
        world: every rank of it must make the call.
        array: has at least one dimension. The first dimension may differ from rank to rank, and be 0. The other
            dimensions and the dtype are equal on all ranks.

    Raises:
        TreeError: `array` is not such an array.
    """
    with _refused_by_all(world, "allgather"):
        host_array = _on_host(array, "allgather", dimensions=1)

    def work(records: numpy.ndarray) -> Generator[float | None, None, Array]:
        ends = numpy.cumsum(records["detail"]).tolist()
        result = numpy.empty((ends[-1], *host_array.shape[1:]), host_array.dtype)
        result[ends[world.rank] - len(host_array) : ends[world.rank]] = host_array
        row = host_array.dtype.itemsize * math.prod(host_array.shape[1:])
        yield from _made_once(world, ALGORITHMS["direct"].allgather)(
            result.reshape(-1).view(numpy.uint8), [length * row for length in records["detail"].tolist()]
        )
        return like(result, array)

    return Handle(world, "collectives.allgather", _any_length(host_array), work, first_dimension=len(host_array))


def alltoall(world: World, arrays: Sequence[Array]) -> Handle[list[Array]]:
    """Begin to send each rank its own array. The result is the arrays for this rank from all ranks, in rank order.

    Args:
        world: every rank of it must make the call.
        arrays: one array for each rank, this rank included, in rank order. First dimensions may differ, and be 0. The
            other dimensions and the dtype are equal for all arrays and on all ranks.

    Raises:
        ConfigError: the number of arrays is not the number of ranks.
        TreeError: an array is not such an array.
    """
    with _refused_by_all(world, "alltoall"):
        if len(arrays) != world.size:
            raise ConfigError(
                f"{world.name()}: alltoall of {len(arrays)} arrays; give one for each of {world.size} ranks"
            )
        host_arrays = [_on_host(array, "alltoall", dimensions=1) for array in arrays]
        for rank, one in enumerate(host_arrays):
            if _any_length(one) != _any_length(host_arrays[0]):
                raise TreeError(
                    f"{world.name()}: alltoall: the array for rank {rank} is {_any_length(one)}, that for rank 0 "
                    f"{_any_length(host_arrays[0])}; they may differ in the first dimension only"
                )

    def work(_: numpy.ndarray) -> Generator[float | None, None, list[Array]]:
        lengths = numpy.empty(world.size, numpy.int64)
        request = world.background.comm.Ialltoall(numpy.array([len(one) for one in host_arrays], numpy.int64), lengths)
        yield from until(request.Test)
        results = [
            numpy.empty((length, *host_arrays[0].shape[1:]), host_arrays[0].dtype) for length in lengths.tolist()
        ]
        results[world.rank][...] = host_arrays[world.rank]
        yield from moves.alltoall(
            world, [one.reshape(-1) for one in host_arrays], [result.reshape(-1) for result in results]
        )
        return [like(result, arrays[0]) for result in results]

    return Handle(world, "collectives.alltoall", _any_length(host_arrays[0]), work)


def broadcast(world: World, array: Array, root: int = 0) -> Handle[Array]:
    """Begin to send `root`'s values to every rank, into a new array.

    Args:
        world: every rank of it must make the call.
        array: shape and dtype are equal on all ranks. Only `root`'s values are sent.
        root: the same on all ranks.

    Raises:
        TreeError: `array` is not an array, or holds Python objects.
        ConfigError: there is no rank `root`.
    """
    with _refused_by_all(world, "broadcast"):
        root = world.check_rank(root, "root")
        host_array = _on_host(array, "broadcast")

    def work(_: numpy.ndarray) -> Generator[float | None, None, Array]:
        result = host_array.copy() if world.rank == root else numpy.empty_like(host_array)
        yield from moves.broadcast(world, result.reshape(-1), root)
        return like(result, array)

    kind = f"{host_array.dtype} {host_array.shape}"
    return Handle(world, f"collectives.broadcast from rank {root}", kind, work, anywhere=world.rank == root)


def allreduce(world: World, array: Array) -> Handle[Array]:
    """Begin to sum an array over ranks. The result is a new array, with the same bits on every rank.

    Args:
        world: every rank of it must make the call.
        array: has one of DTYPES. Shape and dtype are equal on all ranks. Integers wrap.

    Raises:
        TreeError: `array` is not such an array.
    """
    with _refused_by_all(world, "allreduce"):
        host_array = _on_host(array, "allreduce", sums=True)

    def work(_: numpy.ndarray) -> Generator[float | None, None, Array]:
        result = host_array.copy()
        name = "recursive_doubling" if result.nbytes <= moves.SHORT_BYTES else "direct"
        yield from _made_once(world, ALGORITHMS[name].over)(result.reshape(-1))
        return like(result, array)

    return Handle(world, "collectives.allreduce", f"{host_array.dtype} {host_array.shape}", work)


def _made_once(world: World, make: Callable[[Group], T] | None) -> T:
    """An algorithm, or half of one, over the communicator of these calls, with its own scratch memory."""
    made = _made.setdefault(world.background, {})
    if make not in made:
        assert make is not None
        made[make] = make(Group(world.background.comm, tuple(range(world.size)), world.rank))
    result: T = made[make]
    return result


@contextmanager
def _refused_by_all(world: World, operation: str) -> Iterator[None]:
    """Run a block, before a call, in which this rank alone can fail. If it fails, all ranks raise."""
    try:
        yield
    except Exception as error:
        world.refuse(f"collectives.{operation}", error)


def _on_host(array: Array, operation: str, *, sums: bool = False, dimensions: int = 0) -> numpy.ndarray:
    """The array as a contiguous CPU array: the array itself if possible, else a copy."""
    if not is_array(array):
        raise TreeError(f"{operation} takes a NumPy or CuPy array, not {type(array).__name__}")
    check_class(array, f"{operation}: the array")
    if sums and array.dtype not in DTYPES:
        raise TreeError(
            f"{operation} of {array.dtype}: it cannot be summed; allowed are {', '.join(str(one) for one in DTYPES)}"
        )
    if array.dtype.hasobject or array.dtype.itemsize == 0:
        raise TreeError(f"{operation} of dtype {array.dtype}: its items have no bytes to send; convert it to numbers")
    if array.ndim < dimensions:
        raise TreeError(f"{operation} goes along the first dimension, and this array has none; give it one: x[None]")
    host = array.get() if is_device_array(array) else numpy.asarray(array)
    return host if host.flags.c_contiguous else numpy.ascontiguousarray(host)


def _any_length(array: numpy.ndarray) -> str:
    return f"{array.dtype} ({', '.join(['any length', *(str(length) for length in array.shape[1:])])})"
