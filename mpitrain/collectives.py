"""Collective calls on arrays that do not wait: each returns a handle. `world.sum` and its like are the simple way.

    handle = mt.collectives.allgather(world, x)     every rank, the same calls in the same order
    ...                                             compute; other calls of the world
    everything = handle.wait()

What holds for all:

- Ranks that disagree (another call, dtype, shape, root) all get a MismatchError from `test` or `wait`.
- Arrays are NumPy's or CuPy's, of any dtype but Python objects; those that are summed, of one of DTYPES. They are not
  changed, and must not be until the handle is done: what is contiguous on the host is sent from where it is, all else
  is copied first. Results are new arrays, on the device that is current for CuPy arrays.
- Calls run one after the other in the order begun, on a communicator of their own. They may overlap with all else:
  other calls of the world, a step of a GradientReducer. Handles may be waited for in any order.
- A call moves on in `test` and `wait` of any handle, and (more slowly) in every other wait of the world. One whose
  handle is dropped still takes part, and ends at the latest when the program does.

p is the number of ranks, N the bytes of the largest array. Pieces of at most 256 KiB, four at a time in each direction
(pieces.py), in the order that moves.py has:

    call              how                                                           bytes sent by a rank
    reduce_scatter    each part directly to its owner, who adds                     (p-1)/p N
    allgather         each part directly to all others                              p-1 times its own
    alltoall          directly                                                      what it was given
    broadcast         along a chain; to 64 KiB MPI's own                            N
    allreduce         reduce-scatter, allgather; to 64 KiB recursive doubling       2(p-1)/p N; log2 p N

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, Int. J. High
Perform. Comput. Appl. 19 (2005) 49-66 (pairwise exchange).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy

from mpitrain.agreement import Agreement
from mpitrain.allreduce.algorithm import DTYPES
from mpitrain.allreduce.recursive_doubling import recursive_doubling_steps
from mpitrain.arrays import Array, is_array, is_device_array
from mpitrain.background import Begun, Result
from mpitrain.control import until
from mpitrain.cuda.staging import like
from mpitrain.errors import TreeError
from mpitrain.exchange import moves
from mpitrain.world import World, part_of

# The call itself, from all ranks' records on: yields while it has to wait, and returns its result.
Work = Callable[[numpy.ndarray], Generator[float | None, None, Result]]


class Handle(Begun[Result]):
    """A call that has begun."""

    def __init__(self, world: World, operation: str, kind: str, work: Work[Result], first_dimension: int = 0) -> None:
        self._text = f"{operation} of {kind}"
        agreement = world.begin_agreement(operation, [kind], detail=first_dimension)
        super().__init__(world.background, _agreed(agreement, work))

    def __str__(self) -> str:
        return self._text

    def wait(self) -> Result:
        """The result, once it is there.

        Raises:
            MismatchError: on every rank, naming the first difference. `test` raises it too.
        """
        return self._drive()


def _agreed(agreement: Agreement, work: Work[Result]) -> Generator[float | None, None, Result]:
    yield from until(agreement.test)
    return (yield from work(agreement.records))


def reduce_scatter(world: World, array: Array) -> Handle[Array]:
    """This rank's part of the sum over ranks: that of `mpitrain.world.part_of` along the first dimension.

    Args:
        world: every rank calls this.
        array: of one of DTYPES, at least one dimension; shape and dtype equal on all ranks. Integers wrap.

    Returns:
        A handle whose result has the dtype, and the shape but for the first dimension.

    Raises:
        TreeError: `array` is not such an array.
    """
    mine = _host(array, "reduce_scatter", sums=True, dimensions=1)

    def work(_: numpy.ndarray) -> Generator[float | None, None, Array]:
        parts = [part_of(len(mine), rank, world.size) for rank in range(world.size)]
        result = mine[parts[world.rank]].copy()
        yield from moves.reduce_scatter(world, [mine[part].reshape(-1) for part in parts], result.reshape(-1))
        return like(result, array)

    return Handle(world, "collectives.reduce_scatter", f"{mine.dtype} {mine.shape}", work)


def allgather(world: World, array: Array) -> Handle[Array]:
    """The ranks' arrays, one after the other in rank order along the first dimension, on every rank.

    Args:
        world: every rank calls this.
        array: at least one dimension. The first may differ from rank to rank, and be 0; the others and the dtype are
            equal on all ranks.

    Raises:
        TreeError: `array` is not such an array.
    """
    mine = _host(array, "allgather", dimensions=1)

    def work(records: numpy.ndarray) -> Generator[float | None, None, Array]:
        ends = numpy.cumsum(records["detail"]).tolist()
        result = numpy.empty((ends[-1], *mine.shape[1:]), mine.dtype)
        parts = numpy.split(result, ends[:-1])
        parts[world.rank][...] = mine
        yield from moves.allgather(world, [part.reshape(-1) for part in parts])
        return like(result, array)

    return Handle(world, "collectives.allgather", _any_length(mine), work, first_dimension=len(mine))


def alltoall(world: World, arrays: Sequence[Array]) -> Handle[list[Array]]:
    """From every rank the array that it has for this one, in rank order.

    Args:
        world: every rank calls this.
        arrays: one for each rank, in rank order, this one included. First dimensions may differ and be 0; the others
            and the dtype are equal for all arrays and on all ranks.

    Raises:
        ValueError: the number of arrays is not that of the ranks.
        TreeError: an array is not such an array.
    """
    if len(arrays) != world.size:
        raise ValueError(f"{world.name()}: alltoall of {len(arrays)} arrays; give one for each of {world.size} ranks")
    mine = [_host(array, "alltoall", dimensions=1) for array in arrays]
    for rank, one in enumerate(mine):
        if _any_length(one) != _any_length(mine[0]):
            raise TreeError(
                f"{world.name()}: alltoall: the array for rank {rank} is {_any_length(one)}, that for rank 0 "
                f"{_any_length(mine[0])}; they may differ in the first dimension only"
            )

    def work(_: numpy.ndarray) -> Generator[float | None, None, list[Array]]:
        lengths = numpy.empty(world.size, numpy.int64)
        request = world.background.comm.Ialltoall(numpy.array([len(one) for one in mine], numpy.int64), lengths)
        yield from until(request.Test)
        results = [numpy.empty((length, *mine[0].shape[1:]), mine[0].dtype) for length in lengths.tolist()]
        results[world.rank][...] = mine[world.rank]
        yield from moves.alltoall(world, [one.reshape(-1) for one in mine], [result.reshape(-1) for result in results])
        return [like(result, arrays[0]) for result in results]

    return Handle(world, "collectives.alltoall", _any_length(mine[0]), work)


def broadcast(world: World, array: Array, root: int = 0) -> Handle[Array]:
    """`root`'s values in a new array on every rank.

    Args:
        world: every rank calls this.
        array: shape and dtype equal on all ranks; only `root`'s values count.
        root: the same on all ranks.

    Raises:
        TreeError: `array` is not an array, or one of Python objects.
        ValueError: there is no rank `root`.
    """
    world.check_rank(root, "root")
    mine = _host(array, "broadcast")

    def work(_: numpy.ndarray) -> Generator[float | None, None, Array]:
        result = mine.copy() if world.rank == root else numpy.empty_like(mine)
        yield from moves.broadcast(world, result.reshape(-1), root)
        return like(result, array)

    return Handle(world, f"collectives.broadcast from rank {root}", f"{mine.dtype} {mine.shape}", work)


def allreduce(world: World, array: Array) -> Handle[Array]:
    """The sum over ranks in a new array on every rank, with the same bits on all.

    Args:
        world: every rank calls this.
        array: of one of DTYPES; shape and dtype equal on all ranks. Integers wrap.

    Raises:
        TreeError: `array` is not such an array.
    """
    mine = _host(array, "allreduce", sums=True)

    def work(_: numpy.ndarray) -> Generator[float | None, None, Array]:
        result = mine.copy()
        flat = result.reshape(-1)
        if flat.nbytes <= moves.SHORT_BYTES:
            yield from recursive_doubling_steps(world.background.comm)(flat, None)
        else:
            parts = [flat[part_of(flat.size, rank, world.size)] for rank in range(world.size)]
            yield from moves.reduce_scatter(world, parts, parts[world.rank])
            yield from moves.allgather(world, parts)
        return like(result, array)

    return Handle(world, "collectives.allreduce", f"{mine.dtype} {mine.shape}", work)


def _host(array: Array, operation: str, *, sums: bool = False, dimensions: int = 0) -> numpy.ndarray:
    """The array on the host and contiguous: itself if it is that, else a copy."""
    if not is_array(array):
        raise TreeError(f"{operation} takes a NumPy or CuPy array, not {type(array).__name__}")
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
