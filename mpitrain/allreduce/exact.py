"""exact: the correctly rounded sum, by any algorithm of the registry. No order or placement of ranks changes it.

The sum of all summands is rounded once, to nearest, ties to even. So it does not depend on the order of the additions.
There are two methods:

    one rank sees all summands      shared_memory, direct                   it adds them up (accumulator.py)
    partial sums travel             all others; several summands a rank     as whole numbers (fixed_point.py)

The second method uses words of 64 bits, which no algorithm rounds:

    values --> whole numbers on a common scale --> reduce-scatter --> rounded once --> allgather
                                                   of words           by the owner     of floats

Worked: 1, 2^-30 and -1 on three ranks, in float32. The ranks agree that the lowest bit of all is 2^-53, of 2^-30. They
send 2^53, 2^23 and -2^53. The owner gets 2^23 in any order, and rounds it to 2^-30. A sum in float32 is 2^-30 or 0,
depending on the order.

1. Each rank finds the highest and the lowest exponent of each block of 256 values. MPI's own allreduce makes the maxima
   over ranks: 6 bytes a block.
2. Blocks that fit into one word are summed as int64. Blocks of float32 fit into one word if their exponents differ by
   at most 39 - s, with 2^s summands.
3. Other blocks, and most of float64, are summed in several words, one after the other.
4. Infinity and NaN are counted, in one more word for their blocks. The sum follows IEEE 754, in any order: NaN if there
   is a NaN or both infinities; else infinity. All NaNs have the same bits.
5. Each rank rounds its part. Overflow is infinity, and only of the sum itself: a partial sum cannot overflow. A sum of
   zero is +0, whatever the signs of its zeros.

The error is at most half a unit in the last place of the sum, so never above that of a sum in floats.

Cost per rank, relative to the bytes of the algorithm. The first method: 1. The second method, by an algorithm with
halves: 1.5 for float32 in one word, 1.5 for float64 in two, 2.5 for float16 and bfloat16; by an algorithm without
halves: 2, 2 and 4. In addition, 0.6 % for the exponents of float32.

Source: agreed scales as in Demmel and Nguyen, Fast Reproducible Floating-Point Summation, ARITH 2013, but all bits are
kept, as in Kulisch, Computer Arithmetic and Validity, 2nd ed., de Gruyter 2013.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy

from mpitrain.allreduce import ALGORITHMS, check_name, make_algorithm, make_halves
from mpitrain.allreduce.accumulator import MOST_SUMMANDS, Accumulator, Scale, bits_of, no_ranges, scale_of
from mpitrain.allreduce.algorithm import AllreduceHandle, Halves, Progress, Sequential, check_flat, compared, in_phases
from mpitrain.allreduce.fixed_point import BLOCK_VALUES, FORMS, FloatForm
from mpitrain.arrays import Array
from mpitrain.errors import ConfigError, everywhere
from mpitrain.waiting.control import until
from mpitrain.world.world import World

REDUCTIONS = ("plain", "exact")
_CHUNK_VALUES = 2**19
_MOST_OF_A_RANK = numpy.iinfo(numpy.int16).max - 1


def check_reduction(name: str) -> None:
    """Raise ConfigError unless `name` is one of REDUCTIONS."""
    if name not in REDUCTIONS:
        raise ConfigError(f"there is no reduction {name!r}; known: {', '.join(REDUCTIONS)}")


class ExactSum:
    """An Algorithm for floating dtypes. Even with one rank, it turns -0 into +0, and makes all NaNs equal."""

    def __init__(self, world: World, halves: Halves, accumulator: Accumulator, seen: Sequential | None) -> None:
        """Collective.

        Args:
            halves: add up int64.
            seen: adds up with the accumulator, if all summands of a part come to one rank.
        """
        self._world = world
        self._halves = halves
        self._accumulator = accumulator
        self._seen = seen
        self._memory = halves.memory if seen is None else seen.memory
        # For the halves; a single rank needs none. Ranks may have progressed differently with earlier work.
        world.queue.finish()
        count = _CHUNK_VALUES if world.size > 1 else 0
        dtypes = (numpy.dtype(numpy.int64), numpy.dtype(numpy.float64))
        self._words, self._values = (
            numpy.empty(count, dtype) if halves.memory is None else halves.memory.allocate(count, dtype)
            for dtype in dtypes
        )

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """See Algorithm."""
        self._world.queue.finish()
        if dtype in FORMS:
            self._accumulator.compile(dtype)
        return numpy.empty(count, dtype) if self._memory is None else self._memory.allocate(count, dtype)

    def start(
        self,
        flat: Array,
        residual: Array | None = None,
        *,
        agreed: bool = False,
        others: Sequence[numpy.ndarray] | None = None,
    ) -> AllreduceHandle:
        """See Algorithm. `residual` is ignored.

        Args:
            others: further summands of this rank, CPU arrays like `flat`; not changed. Either all ranks give them, or
                none does. The number may differ between ranks, and be 0. A rank may have at most 32765, and that number
                times the number of ranks, for the rank with the most, may be at most MOST_SUMMANDS.

        Raises:
            ValueError: `flat` or one of `others` is not such an array.
            ConfigError: there are too many summands. Raised on every rank, by the handle.
        """
        summands = [flat, *(others or ())]
        for summand in summands:
            check_flat(summand)
            if summand.dtype not in FORMS or (summand.dtype, summand.size) != (flat.dtype, flat.size):
                raise ValueError(
                    f"{self._world.name()}: an exact sum of {summand.size} {summand.dtype} into {flat.size} "
                    f"{flat.dtype}; all summands must have one length and one dtype of "
                    f"{', '.join(str(dtype) for dtype in FORMS)}"
                )
        shared = self._memory is not None and self._memory.holds(flat)
        seen = self._seen if others is None else None
        name = f"exact {self._halves.name if seen is None else seen.name}"
        steps = self.steps(flat, others=others)
        if not agreed:
            place = "memory that the node shares" if shared else "memory"
            steps = compared(self._world, name if others is None else f"{name} of several summands", flat, place, steps)
        return AllreduceHandle(self._world, name, flat, steps)

    def steps(
        self, flat: Array, residual: Array | None = None, others: Sequence[numpy.ndarray] | None = None
    ) -> Progress:
        """The work on one buffer, for algorithms that contain this one. The arguments are those of `start`."""
        summands = [flat, *(others or ())]
        if flat.size == 0:
            return iter(())
        if self._world.size == 1:
            return self._alone(summands)
        if self._seen is not None and others is None:
            return self._seen.steps(flat)
        return self._in_words(flat, summands)

    def _alone(self, summands: Sequence[numpy.ndarray]) -> Progress:
        self._bound(len(summands))
        self._accumulator.add_up(summands, summands[0])
        yield from ()

    @in_phases
    def _in_words(self, flat: numpy.ndarray, summands: Sequence[numpy.ndarray]) -> Iterator[Progress]:
        form, ranges, chunk_blocks = FORMS[flat.dtype], no_ranges(flat.size), _CHUNK_VALUES // BLOCK_VALUES
        for begin in range(0, ranges.shape[1], chunk_blocks):
            part = slice(begin * BLOCK_VALUES, (begin + chunk_blocks) * BLOCK_VALUES)
            for one in summands:
                own_ranges = ranges[:, begin : begin + chunk_blocks]
                self._accumulator.raise_ranges(form, bits_of(form, one[part]), own_ranges)
            yield iter((None,))  # the caller may do other work in between
        most = numpy.array([min(len(summands), _MOST_OF_A_RANK + 1)], numpy.int16)
        sent = numpy.concatenate([ranges.ravel(), most])
        yield _maximum(self._world, sent)
        scale = scale_of(form, sent[:-1].reshape(ranges.shape), self._bound(int(sent[-1])))
        memory = self._halves.memory
        gathers_there = memory is None or memory.holds(flat)
        for begin in range(0, ranges.shape[1], chunk_blocks):
            chunk = scale.of(slice(begin, begin + chunk_blocks))
            part = slice(begin * BLOCK_VALUES, min((begin + chunk_blocks) * BLOCK_VALUES, flat.size))
            here = [bits_of(form, one[part]) for one in summands]
            for chosen in _passes(chunk):
                if chosen is None:
                    yield self._sum(form, here, chunk, flat[part], gathers_there)
                    continue
                places = numpy.repeat(chosen, BLOCK_VALUES)[: part.stop - part.start].nonzero()[0]
                sums = numpy.empty(places.size, flat.dtype)
                yield self._sum(form, [bits[places] for bits in here], chunk.of(chosen), sums, False)
                flat[part][places] = sums

    @in_phases
    def _sum(
        self, form: FloatForm, summands: Sequence[numpy.ndarray], scale: Scale, sums: numpy.ndarray, gathers_there: bool
    ) -> Iterator[Progress]:
        """Overwrite `sums`, whether or not the halves can gather there."""
        own = self._halves.own(sums.size, self._world.rank)
        words = self._words[: sums.size]
        totals = words[None, own]
        if scale.num_words > 1:
            totals = numpy.empty((scale.num_words, own.stop - own.start), numpy.int64)
        for word in range(scale.num_words):
            self._accumulator.write_word(form, summands, scale, word, words)
            yield self._halves.reduce_scatter(words)
            if scale.num_words > 1:
                totals[word] = words[own]
        gathered = sums if gathers_there else self._values.view(sums.dtype)[: sums.size]
        self._accumulator.round(form, totals, own.start, scale, gathered[own])
        yield self._halves.allgather(gathered)
        if not gathers_there:
            sums[:] = gathered

    def _bound(self, most: int) -> int:
        """The largest possible number of summands, from the largest number on any rank."""
        bound = most * self._world.size
        if most > _MOST_OF_A_RANK or bound > MOST_SUMMANDS:
            raise everywhere(
                ConfigError(
                    f"an exact sum of at least {most} summands on one of {self._world.size} ranks; allowed are "
                    f"{_MOST_OF_A_RANK} on a rank, and {MOST_SUMMANDS} if all ranks have as many. Add up fewer at once"
                )
            )
        return bound


def exact_sum(world: World, name: str | None = None) -> ExactSum:
    """Make the exact sum by the algorithm of that name, or of the world's settings. Collective.

    Raises:
        ConfigError: there is no algorithm of that name, or it does not suit this world. On every rank.
        MismatchError: the ranks give different names. On every rank.
    """
    name = world.config.algorithm if name is None else name
    world.agree("make an exact sum", [name])
    check_name(name)
    entry, accumulator = ALGORITHMS[name], Accumulator()
    has_halves = entry.halves is not None or entry.reduce_scatter is not None
    halves = make_halves(world, name) if has_halves else _whole(world, name)
    seen = None if entry.seen is None else entry.seen(world, accumulator.add_up)
    return ExactSum(world, halves, accumulator, seen)


def _whole(world: World, name: str) -> Halves:
    """Halves from an algorithm without halves: every rank has the whole sum after the first one."""
    algorithm = make_algorithm(world, name)
    return Halves(name, algorithm.steps, lambda _: iter(()), lambda count, _: slice(0, count), algorithm.memory)


@in_phases
def _maximum(world: World, numbers: numpy.ndarray) -> Iterator[Progress]:
    """Replace numbers by their maxima over ranks."""
    from mpi4py import MPI

    yield until(world.comm.Iallreduce(MPI.IN_PLACE, numbers, MPI.MAX).Test)


def _passes(scale: Scale) -> list[numpy.ndarray | None]:
    """Divide blocks into those of one word and others; None: all at once.

    To copy blocks out takes time, so this is done only if few blocks need more than a word.
    """
    hard = scale.special | (scale.limbs > 1)
    if 2 * numpy.count_nonzero(hard) > hard.size or not hard.any():
        return [None]
    return [~hard, hard]
