"""The interface of allreduce algorithms: work that a caller can drive in steps, or wait for.

No MPI library moves a large message between calls of the library. So the caller that starts an allreduce drives it: by
calling `test()` now and then while computing, or `wait()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import ml_dtypes
import numpy

from mpitrain.allreduce.group import Group
from mpitrain.arrays import Array, is_device_array
from mpitrain.waiting.background import Begun
from mpitrain.waiting.control import until
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)
FLOATS = tuple(numpy.dtype(name) for name in ("float16", "float32", "float64")) + (BFLOAT16,)
INTEGERS = tuple(numpy.dtype(code + str(size)) for code in "iu" for size in (1, 2, 4, 8))
DTYPES = FLOATS + INTEGERS
_SUMMABLE = frozenset(DTYPES)

# The work of one allreduce. Each `next` makes the progress that is possible now. The work yields while it must wait
# (None: call again at once; a number: the seconds that the caller may sleep), and ends when the buffer holds the sum.
Progress: TypeAlias = Iterator[float | None]

# Adds up host arrays into the last argument, which is one of them.
AddAll: TypeAlias = Callable[[Sequence[numpy.ndarray], numpy.ndarray], None]

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")


class Allocator(Protocol):
    """Memory that suits an algorithm best."""

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """See Algorithm."""
        ...

    def holds(self, flat: Array) -> bool:
        """True if `flat` is a part of this memory."""
        ...


class Steps(Protocol):
    """Makes the work for one buffer."""

    def __call__(self, flat: numpy.ndarray, residual: numpy.ndarray | None = None, /) -> Progress:
        """See Algorithm.start."""
        ...


def in_phases(work: Callable[Arguments, Iterator[Iterator[Item]]]) -> Callable[Arguments, Iterator[Item]]:
    """Makes steps from a generator function that yields the phases of the work; each phase again consists of steps.

    `yield meet(mates)` means `yield from meet(mates)`, but saves a frame of Python between the driver and the phase.
    """

    @wraps(work)
    def steps(*arguments: Arguments.args, **named: Arguments.kwargs) -> Iterator[Item]:
        return chain.from_iterable(work(*arguments, **named))

    return steps


class Piece(Protocol):
    """A reduce-scatter or an allgather over a group of ranks: half of an allreduce, usable separately."""

    def __call__(self, flat: Array, lengths: Sequence[int] | None = None, /) -> Progress:
        """The work on one buffer, which has a part for each member of the group, in the order of members.

        Reduce-scatter: member i ends with the sum of all members' parts i in its part i. Its other parts hold partial
        sums, or their old values. Allgather: member i contributes part i, and ends with all parts.

        Args:
            flat: one-dimensional and contiguous, equally long on every rank; for a sum of one of DTYPES, else any
                dtype.
            lengths: lengths of the parts in elements, the same on every rank, may be 0; default: those of part_of.
        """
        ...


class Halves(NamedTuple):
    """Both halves of one algorithm, made for a World, for a caller that works on its own part in between.

        rank                0               1               2               3
        start           a0 b0 c0 d0     a1 b1 c1 d1     a2 b2 c2 d2     a3 b3 c3 d3
        reduce_scatter  A  .  .  .      .  B  .  .      .  .  C  .      .  .  .  D
        the caller      A'              B'              C'              D'
        allgather       A' B' C' D'     A' B' C' D'     A' B' C' D'     A' B' C' D'

    Each half sends half of what the allreduce sends. The sums have the bits of the allreduce of the same name, because
    the first half of that allreduce makes them, over the same parts. All ranks make the same calls in the same order.

    An algorithm that has halves over a group (Entry.reduce_scatter, Entry.allgather) gets them from `of_group`. One for
    a whole World has a function of its own (Entry.halves).

    Attributes:
        name: of the algorithm.
        reduce_scatter: work on a flat host array that ends with the sum over ranks in this rank's part of it. The other
            parts then hold partial sums or their old values. After that, no other rank reads this rank's array.
        allgather: work on a flat host array, in which each rank has filled its part. It ends with all parts.
        own: `own(count, rank)` returns a rank's part of an array of `count` elements, the same on every rank. The
            parts of all ranks are disjoint and complete, and some may be empty.
        memory: where the arrays must be allocated; None: anywhere.
    """

    name: str
    reduce_scatter: Callable[[numpy.ndarray], Progress]
    allgather: Callable[[numpy.ndarray], Progress]
    own: Callable[[int, int], slice]
    memory: Allocator | None = None


def of_group(name: str, group: Group, reduce_scatter: Piece, allgather: Piece) -> Halves:
    """The halves of an algorithm over a group that has all ranks of its World."""

    def own(count: int, rank: int) -> slice:
        return part_of(count, group.members.index(rank), group.size)

    return Halves(name, reduce_scatter, allgather, own)


class AllreduceHandle(Begun[None]):
    """A started allreduce. Several on one communicator run in the order in which they were started."""

    def __init__(self, world: World, name: str, flat: Array, steps: Progress) -> None:
        self._name = name
        self._flat = flat  # kept until MPI has finished with it
        world.control.count_call()
        super().__init__(world.queue, steps)

    def __str__(self) -> str:
        return f"allreduce {self._name} of {self._flat.size} {self._flat.dtype}"

    def wait(self) -> None:
        """Drive until the buffer holds the sum."""
        self._drive()


class Algorithm(Protocol):
    """The result of a factory such as `ring(world)`. Owns its scratch memory."""

    def start(self, flat: Array, residual: Array | None = None, *, agreed: bool = False) -> AllreduceHandle:
        """Begin to replace `flat` by its sum over ranks; bitwise identical on every rank.

        Every rank starts the same number of elements of the same dtype, in the same kind of memory, in the same order
        of calls.

        Args:
            flat: one-dimensional, contiguous, writable host array of one of DTYPES, any length. It must not be
                touched until the handle is done. Sums are made in its own dtype; integers wrap.
            residual: for an algorithm that compresses: a float32 CPU array with the same number of elements, the
                residual of earlier calls. It is added to what this rank sends, and overwritten by the new residual.
                Other algorithms ignore it.
            agreed: the ranks have already compared what they start, as they do once for a bucket's layout. Otherwise
                they compare it here, and if they differ, the handle raises a MismatchError on every rank.

        Raises:
            ValueError: `flat` is not such an array. An array is never copied silently.
        """
        ...

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """Make an uninitialised flat array in the memory that suits this algorithm best.

        Collective, for the same `count` and `dtype`; earlier work ends first. If ranks sum a part of such an array, all
        ranks use the same part of the same array. The array is freed with the last reference to it.
        """
        ...


class Sequential:
    """An Algorithm from a generator function.

    Work started on one communicator, by any algorithm, runs one after the other. So the messages of two buffers never
    mix, and one scratch buffer serves all buffers of an algorithm.

    Attributes:
        name: of the algorithm.
        steps: the work on one buffer, for algorithms that contain this one.
        memory: the memory that suits the algorithm best; None: any.
    """

    def __init__(self, world: World, name: str, steps: Steps, memory: Allocator | None = None) -> None:
        self.steps = steps
        self.memory = memory
        self.name = name
        self._world = world

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """See Algorithm."""
        # Ranks may have progressed differently with earlier work; none of that work may wait for this call.
        self._world.queue.finish()
        return numpy.empty(count, dtype) if self.memory is None else self.memory.allocate(count, dtype)

    def start(self, flat: Array, residual: Array | None = None, *, agreed: bool = False) -> AllreduceHandle:
        """See Algorithm."""
        check_flat(flat)
        steps: Progress = iter(())
        if self._world.size > 1 and flat.size > 0:
            steps = self.steps(flat, residual)
        if not agreed:
            shared = self.memory is not None and self.memory.holds(flat)
            steps = compared(self._world, self.name, flat, "memory that the node shares" if shared else "memory", steps)
        return AllreduceHandle(self._world, self.name, flat, steps)


def compared(world: World, name: str, flat: Array, memory: str, steps: Progress) -> Progress:
    """The steps, after all ranks have compared what they start; the comparison begins now, in the order of calls."""
    agreement = world.begin_agreement(f"allreduce {name}", [f"{flat.size} {flat.dtype} in {memory}"])

    return chain(until(agreement.test), steps)


def check_flat(flat: Array) -> None:
    """Raise ValueError unless `flat` is what Algorithm.start takes."""
    if not isinstance(flat, numpy.ndarray):
        kind = f"{type(flat).__module__}.{type(flat).__name__}".removeprefix("builtins.")
        hint = ". Arrays on GPUs are for mpitrain.cuda.transports.make_transport" if is_device_array(flat) else ""
        raise ValueError(f"allreduce takes a NumPy array, not {kind}{hint}")
    if flat.ndim != 1 or not flat.flags.c_contiguous or not flat.flags.writeable:
        raise ValueError(
            f"allreduce works in place on a one-dimensional, contiguous, writable array; this one has shape "
            f"{flat.shape}, strides {flat.strides}, writable={flat.flags.writeable}. "
            "Pack it first: flat = numpy.ascontiguousarray(x).ravel()"
        )
    if flat.dtype not in _SUMMABLE or not flat.dtype.isnative:
        raise ValueError(f"allreduce cannot sum {flat.dtype}; allowed are {', '.join(str(dtype) for dtype in DTYPES)}")
