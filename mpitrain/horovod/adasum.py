"""adasum: for each tensor, the sum of the ranks' gradients where they are orthogonal, the mean where they agree.

Two gradients a and b of a tensor become

    adasum(a, b) = (1 - a.b / 2|a|²) a + (1 - a.b / 2|b|²) b

which is a + b if they are orthogonal, and a if they are equal. A gradient of zeros changes nothing. The ranks form a
tree, because this is not associative. Four ranks, and seven: the first six form pairs, so that four seats are left:

    0 + 1   2 + 3         0 + 1   2 + 3   4 + 5     6
      (01) + (23)           (01) + (23)     (45) + (6)
                                (0123) + (456)

With a power of two of ranks this is Horovod's tree. Horovod refuses other numbers.

Vectors are halved as the ranks meet: each pair divides what it has, and each partner combines its own half. The two
products of a tensor are then summed over all ranks that have a part of it:

    rank            0           1           2           3
    start           a0 b0       a1 b1       a2 b2       a3 b3
    partner         1           0           3           2           half of the buffer, then 3 numbers for each tensor
    has             a01         b01         a23         b23
    partner         2           3           0           1           a quarter of it, ...
    has             A first     B first     A second    B second
    and back        A B         A B         A B         A B

Products are made and summed in float64; each combination is computed in float64 and rounded once. Only one rank
computes each element, so all ranks have the same bits.

Cost per rank: 2(p-1)/p N bytes, as for halving_doubling, and 24 bytes for each tensor in about (log2 p)²/2 messages.
For other numbers of ranks, N bytes there and back in each pair. Scratch: half of the buffer, or all of it in a pair.
Source: Maleki et al., Scaling distributed training with adaptive summation, MLSys 2021, equation 3 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy

from mpitrain.allreduce.algorithm import Progress, in_phases
from mpitrain.allreduce.group import Group
from mpitrain.allreduce.pairs import seating
from mpitrain.allreduce.recursive_doubling import recursive_doubling_steps
from mpitrain.waiting.pieces import Mover

_TAG = 41
_AT_ONCE = 2**16  # elements that are computed with in float64 at one time
# A gradient with a smaller squared norm counts as zero, as in Horovod: a quotient of such numbers is meaningless.
_LEAST_SQUARE = float(numpy.sqrt(numpy.finfo(numpy.float64).tiny))


def adasum_steps(group: Group, tensors: Sequence[slice]) -> Callable[[numpy.ndarray], Progress]:
    """The steps over the members of the group, in their order, for a buffer of these tensors."""
    power, rest = seating(group.size)
    place, mover = group.index, Mover(group.comm, _TAG)
    is_paired = place < 2 * rest
    seat = place // 2 if is_paired else place - rest

    def rank(of_seat: int) -> int:
        return group.members[2 * of_seat + 1 if of_seat < rest else of_seat + rest]

    @in_phases
    def steps(flat: numpy.ndarray) -> Iterator[Progress]:
        if is_paired and place % 2 == 0:
            mate = group.members[place + 1]
            yield mover.move([(mate, flat)], [])
            yield mover.move([], [(mate, flat)])
            return
        mate = group.members[place - 1]
        scratch = numpy.empty(flat.size if is_paired else -(-flat.size // 2), flat.dtype)
        if is_paired:
            yield mover.move([], [(mate, scratch)])
            _combine(scratch, flat, _products(scratch, flat, tensors), tensors, flat)
        own, halved = slice(0, flat.size), []
        for bit in range(power.bit_length() - 1):
            is_upper, partner = bool(seat >> bit & 1), rank(seat ^ 1 << bit)
            middle = (own.start + own.stop) // 2
            kept, given = slice(own.start, middle), slice(middle, own.stop)
            if is_upper:
                kept, given = given, kept
            here, arrived = flat[kept], scratch[: kept.stop - kept.start]
            yield mover.move([(partner, flat[given])], [(partner, arrived)])
            left, right = (arrived, here) if is_upper else (here, arrived)
            parts = [_within(tensor, kept) for tensor in tensors]
            products = _products(left, right, parts)
            first = seat - seat % (2 << bit)
            members = tuple(rank(one) for one in range(first, first + (2 << bit)))
            yield recursive_doubling_steps(Group(group.comm, members, seat - first))(products.reshape(-1))
            _combine(left, right, products, parts, here)
            halved.append((partner, kept, given))
            own = kept
        for partner, kept, given in reversed(halved):
            yield mover.move([(partner, flat[kept])], [(partner, flat[given])])
        if is_paired:
            yield mover.move([(mate, flat)], [])

    return steps


def _within(tensor: slice, part: slice) -> slice:
    """The elements of a tensor that are in a part of the buffer, counted from the beginning of that part."""
    begin, end = max(tensor.start, part.start), min(tensor.stop, part.stop)
    return slice(begin - part.start, max(begin, end) - part.start)


def _products(left: numpy.ndarray, right: numpy.ndarray, tensors: Sequence[slice]) -> numpy.ndarray:
    """left.right, left.left and right.right of each tensor, in float64."""
    sums = numpy.zeros((len(tensors), 3))
    with numpy.errstate(all="ignore"):  # infinity is a value like any other here
        for row, tensor in enumerate(tensors):
            for block in _blocks(tensor):
                a, b = (one[block].astype(numpy.float64) for one in (left, right))
                sums[row] += a @ b, a @ a, b @ b
    return sums


def _combine(
    left: numpy.ndarray, right: numpy.ndarray, products: numpy.ndarray, tensors: Sequence[slice], out: numpy.ndarray
) -> None:
    """Write the adaptive sum of each tensor to `out`, which is one of the two."""
    with numpy.errstate(all="ignore"):
        for (both, *squares), tensor in zip(products, tensors, strict=True):
            of_left, of_right = (1 - both / square / 2 if not square < _LEAST_SQUARE else 1.0 for square in squares)
            for block in _blocks(tensor):
                out[block] = of_left * left[block].astype(numpy.float64) + of_right * right[block].astype(numpy.float64)


def _blocks(tensor: slice) -> Iterator[slice]:
    for begin in range(tensor.start, tensor.stop, _AT_ONCE):
        yield slice(begin, min(begin + _AT_ONCE, tensor.stop))
