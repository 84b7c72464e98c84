"""Allreduce in phases: in each one a rank exchanges a part of the buffer with one partner. What two algorithms share.

recursive_doubling.py and halving_doubling.py say who meets whom, with what; here it is done. A part travels in pieces
(mpitrain/pieces.py). A phase begins when the one before it is complete.

Both algorithms are for a power of two of ranks. Of other numbers, p = q + r with q the largest power of two, the first
2r ranks stand in pairs: the even one hands its buffer to the odd one, which adds it to its own, takes part for both,
and hands the result back. Seven ranks, q = 4, r = 3:

    rank             0   1   2   3   4   5   6
    before           0 > 1   2 > 3   4 > 5
    among four           0       1       2   3
    after            0 < 1   2 < 3   4 < 5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy

from mpitrain.allreduce.algorithm import Progress, Steps
from mpitrain.pieces import Mover

if TYPE_CHECKING:
    from mpi4py import MPI

NOTHING = slice(0, 0)


class Phase(NamedTuple):
    """What one rank does in one phase. The slices are in elements: equal ones, or apart from each other."""

    partner: int
    send: slice
    receive: slice
    adds: bool  # what is received to what is there; else it overwrites that


# From the number of elements, this rank's place, and how many ranks there are, a power of two: its phases.
Plan = Callable[[int, int, int], Sequence[Phase]]


def steps_of(comm: MPI.Comm, plan: Plan, tag: int) -> Steps:
    """The steps of an algorithm whose phases, for a power of two of ranks, `plan` gives; any number of ranks."""
    rank, size = comm.rank, comm.size
    cached = lru_cache(maxsize=256)(lambda count: for_any_size(plan, count, rank, size))
    mover = Mover(comm, tag)

    def steps(flat: numpy.ndarray, _residual: numpy.ndarray | None = None) -> Progress:
        for partner, send, receive, adds in cached(flat.size):
            add = (_add_left if rank < partner else _add_right) if adds else None
            parts = [(partner, flat[send])], [(partner, flat[receive])]
            yield from mover.move(*parts, add=add, same=send == receive)

    return steps


def for_any_size(plan: Plan, count: int, rank: int, size: int) -> list[Phase]:
    """The phases of `rank` among `size` ranks, of any number."""
    power = 1 << (size.bit_length() - 1)
    rest = size - power
    whole = slice(0, count)
    is_paired = rank < 2 * rest
    if is_paired and rank % 2 == 0:
        return [Phase(rank + 1, whole, NOTHING, False), Phase(rank + 1, NOTHING, whole, False)]
    place = rank // 2 if is_paired else rank - rest
    phases = [
        phase._replace(partner=2 * phase.partner + 1 if phase.partner < rest else phase.partner + rest)
        for phase in plan(count, place, power)
    ]
    if is_paired:
        phases = [Phase(rank - 1, NOTHING, whole, True), *phases, Phase(rank - 1, whole, NOTHING, False)]
    return phases


def _add_left(mine: numpy.ndarray, arrived: numpy.ndarray) -> None:
    """Add to `mine`, with the same bits as _add_right on the other side: of two NaNs the sum is the left one."""
    _add(mine, arrived, mine)


def _add_right(mine: numpy.ndarray, arrived: numpy.ndarray) -> None:
    _add(arrived, mine, mine)


def _add(left: numpy.ndarray, right: numpy.ndarray, mine: numpy.ndarray) -> None:
    # Infinity is a value like any other here; whoever must not have it looks at the sum.
    with numpy.errstate(all="ignore"):
        # Where there is only one of each, NumPy takes it for a reduction, and what is overwritten for the left one.
        if mine.size == 1:
            mine[0] = (left + right)[0]
        else:
            numpy.add(left, right, out=mine)
