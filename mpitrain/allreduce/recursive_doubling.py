"""recursive_doubling: in log2 p phases every rank exchanges its whole buffer; the fewest messages, for short buffers.

In phase i, ranks whose numbers differ only in bit i exchange everything they have, and both add. Each phase doubles the
number of ranks with the same sum:

    0 <-> 1     2 <-> 3        phase 0: bit 0
    0 <------> 2, 1 <------> 3 phase 1: bit 1

Four ranks; a0 is rank 0's buffer, a01 the sum of rank 0's and rank 1's, A the whole sum:

    rank        0           1           2           3
    start       a0          a1          a2          a3
    partner     1           0           3           2             phase 0
    has         a01         a01         a23         a23
    partner     2           3           0           1             phase 1
    has         A           A           A           A             a01 + a23 on all

A sum of two is the same number on both sides, in either order, so all ranks with the same sum have the same bits. The
lower rank's operand is always on the left, which only matters if both are NaN.

Cost per rank: log2 p phases, each of which sends and receives N bytes and adds all elements. This is log2 p latencies,
the least of any allreduce, and log2 p N bytes, more than the ring's 2(p-1)/p N for more than two ranks. If p is not a
power of two, two more phases (pairs.py). Scratch: 1 MiB, less for shorter buffers.
Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, Int. J. High
Perform. Comput. Appl. 19 (2005) 49-66, section 4.4 and, for other numbers of ranks, 4.5.
"""

from __future__ import annotations

from mpitrain.allreduce.algorithm import Sequential, Steps
from mpitrain.allreduce.group import Group, everyone
from mpitrain.allreduce.pairs import Phase, for_any_size, steps_of
from mpitrain.world.world import World

_TAG = 40


def recursive_doubling(world: World) -> Sequential:
    """log2 p exchanges of the whole buffer. See Algorithm for the contract."""
    return Sequential(world, "recursive_doubling", recursive_doubling_steps(everyone(world)))


def recursive_doubling_steps(group: Group) -> Steps:
    """Run the steps over the members of the group, in their order."""
    return steps_of(group, lambda count: plan(count, group.index, group.size), _TAG)


def plan(count: int, place: int, size: int) -> list[Phase]:
    """The phases of the member at `place` among `size`, for a buffer of `count` elements."""
    whole = slice(0, count)

    def seats(seat: int, power: int) -> list[Phase]:
        return [Phase(seat ^ 1 << bit, whole, whole, adds=True) for bit in range(power.bit_length() - 1)]

    return for_any_size(seats, place, size, before=whole, after=whole)
