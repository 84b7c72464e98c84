"""halving_doubling: reduce-scatter by halving, then allgather by doubling: few messages, the fewest bytes.

The buffer is cut into p segments. In the first half, partners who are p/2 apart exchange the halves of what they have:
each sends the half that the other one keeps, and adds what it receives to the half that it keeps; then partners p/4
apart, with half as much, until each rank has one complete segment. The second half goes the same way back: what is
complete is exchanged, and grows twofold in each phase.

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

Cost a rank: 2 log2 p phases and 2(p-1)/p of the buffer's bytes sent and received, the least any allreduce can; (p-1)/p
of the elements added. Fewer latencies than the ring's 2(p-1), but every phase has another partner, half of them far
apart, where the ring's messages only go to the neighbour. Where p is no power of two, two more phases, of N bytes one
way each (pairs.py): then the ring is better for large buffers. Scratch: 1 MiB, less for shorter buffers.
Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004, LNCS 3036, 1-9; Thakur, Rabenseifner
and Gropp, Optimization of collective communication operations in MPICH, Int. J. High Perform. Comput. Appl. 19 (2005)
49-66, section 4.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.allreduce.algorithm import Sequential, Steps
from mpitrain.allreduce.pairs import Phase, steps_of
from mpitrain.world import World, part_of

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 41


def halving_doubling(world: World) -> Sequential:
    """Recursive halving, then recursive doubling. See Algorithm for the contract."""
    return Sequential(world, "halving_doubling", halving_doubling_steps(world.comm))


def halving_doubling_steps(comm: MPI.Comm) -> Steps:
    """Its steps over the ranks of `comm`."""
    return steps_of(comm, plan, _TAG)


def plan(count: int, rank: int, size: int) -> list[Phase]:
    """The phases of one of `size` ranks, a power of two, for a buffer of `count` elements."""

    def elements(first_segment: int, num_segments: int) -> slice:
        last = part_of(count, first_segment + num_segments - 1, size)
        return slice(part_of(count, first_segment, size).start, last.stop)

    halving: list[Phase] = []
    distance = size // 2
    while distance:
        partner = rank ^ distance
        # The first of the segments that a rank still has are those whose numbers begin with the same bits as its own.
        mine, other = (elements(one - one % distance, distance) for one in (rank, partner))
        halving.append(Phase(partner, send=other, receive=mine, adds=True))
        distance //= 2
    doubling = [Phase(partner, send=mine, receive=other, adds=False) for partner, other, mine, _ in reversed(halving)]
    return halving + doubling
