"""halving_doubling: reduce-scatter by halving, then allgather by doubling: few messages, the fewest bytes.

The buffer is cut into p segments. In the first half, partners p/2 apart exchange halves of what they have: each sends
the half that the partner keeps, and adds what it receives to the half that it keeps itself. Then partners p/4 apart do
the same with half as much, until each rank has one complete segment. The second half reverses this: complete segments
are exchanged, and each phase doubles what a rank has.

Four ranks; a0 is rank 0's part of segment a, a02 = a0+a2, A the sum of all:

    rank        0               1               2               3
    start       a0 b0 c0 d0     a1 b1 c1 d1     a2 b2 c2 d2     a3 b3 c3 d3
    sends       c d to 2        c d to 3        a b to 0        a b to 1      phase 0
    has         a02 b02         a13 b13         c02 d02         c13 d13
    sends       b to 1          a to 0          d to 3          c to 2        phase 1
    has         A               B               C               D
    sends       A to 1          B to 0          C to 3          D to 2        phase 2
    has         A B             A B             C D             C D
    sends       A B to 2        A B to 3        C D to 0        C D to 1      phase 3
    has         A B C D         A B C D         A B C D         A B C D

Every segment was added up on one rank and copied from there, so all ranks end with the same bits.

Cost per rank: 2 log2 p phases and 2(p-1)/p of the buffer's bytes sent and received, the least of any allreduce; (p-1)/p
of the elements added. There are fewer latencies than the ring's 2(p-1), but every phase has a different partner, half
of them far apart, while the ring's messages only go to the neighbour. If p is not a power of two, there are two more
phases of N bytes, one way each (pairs.py): then the ring is better for large buffers. Scratch: 1 MiB, less for shorter
buffers. Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004, LNCS 3036, 1-9; Thakur,
Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, Int. J. High Perform. Comput.
Appl. 19 (2005) 49-66, section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from mpitrain.allreduce.algorithm import Piece, Progress, Sequential, Steps
from mpitrain.allreduce.group import Group, everyone, segments
from mpitrain.allreduce.pairs import Phase, Seats, for_any_size, runner, seating, steps_of
from mpitrain.arrays import Array
from mpitrain.world.world import World

_TAG = 41


def halving_doubling(world: World) -> Sequential:
    """Recursive halving, then recursive doubling. See Algorithm for the contract."""
    return Sequential(world, "halving_doubling", halving_doubling_steps(everyone(world)))


def halving_doubling_steps(group: Group) -> Steps:
    """Run both halves over the members of the group, in their order."""
    return steps_of(group, lambda count: plan(segments(count, group.size), group.index), _TAG)


def halving_reduce_scatter(group: Group) -> Piece:
    """The first half by itself: member i ends with part i complete; the other parts hold partial sums.

    log2 p phases, (p-1)/p of the bytes. If p is not a power of two, the even rank of a pair hands over its buffer
    before, and receives its part after: two more phases, of N and N/p bytes.
    """
    return _piece(group, halving_plan)


def doubling_allgather(group: Group) -> Piece:
    """The second half by itself: member i contributes part i, all end with all parts.

    log2 p phases, (p-1)/p of the bytes. If p is not a power of two, the even rank of a pair hands over its part before,
    and receives all parts after: two more phases, of N/p and N bytes.
    """
    return _piece(group, doubling_plan)


def _piece(group: Group, make_plan: Callable[[list[slice], int], list[Phase]]) -> Piece:
    run = runner(group, _TAG)

    @lru_cache(maxsize=256)
    def cached(count: int, lengths: tuple[int, ...] | None) -> list[Phase]:
        return make_plan(segments(count, group.size, lengths), group.index)

    def work(flat: Array, lengths: Sequence[int] | None = None) -> Progress:
        return run(flat, cached(flat.size, None if lengths is None else tuple(lengths)))

    return work


def plan(parts: list[slice], place: int) -> list[Phase]:
    """The phases of the member at `place` for a buffer with these parts, one per member: both halves."""
    whole = slice(0, parts[-1].stop)
    halving, doubling = _halving(parts), _doubling(parts)
    return for_any_size(
        lambda seat, power: [*halving(seat, power), *doubling(seat, power)], place, len(parts), whole, whole
    )


def halving_plan(parts: list[slice], place: int) -> list[Phase]:
    """The phases of the first half."""
    whole = slice(0, parts[-1].stop)
    return for_any_size(_halving(parts), place, len(parts), before=whole, after=parts[place - place % 2])


def doubling_plan(parts: list[slice], place: int) -> list[Phase]:
    """The phases of the second half."""
    whole = slice(0, parts[-1].stop)
    return for_any_size(_doubling(parts), place, len(parts), before=parts[place - place % 2], after=whole, adds=False)


def _halving(parts: list[slice]) -> Seats:
    _, rest = seating(len(parts))

    def elements(first_seat: int, num_seats: int) -> slice:
        """The parts of all members on these seats."""
        # The first `rest` seats have two members each.
        begin, end = (seat + min(seat, rest) for seat in (first_seat, first_seat + num_seats))
        return slice(parts[begin].start, parts[end - 1].stop)

    def seats(seat: int, power: int) -> list[Phase]:
        phases: list[Phase] = []
        distance = power // 2
        while distance:
            partner = seat ^ distance
            # The seats whose parts a member still has begin with the same bits. Take the first of them.
            kept, given = (elements(one - one % distance, distance) for one in (seat, partner))
            phases.append(Phase(partner, send=given, receive=kept, adds=True))
            distance //= 2
        return phases

    return seats


def _doubling(parts: list[slice]) -> Seats:
    """The reverse phase: send what was kept, receive what was given away."""
    halving = _halving(parts)

    def seats(seat: int, power: int) -> list[Phase]:
        return [
            Phase(partner, send=kept, receive=given, adds=False)
            for partner, given, kept, _ in reversed(halving(seat, power))
        ]

    return seats
