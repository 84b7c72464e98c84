"""Allreduce in phases: in each, a rank exchanges a part of the buffer with one partner. Shared by two algorithms.

recursive_doubling.py and halving_doubling.py determine the partners and parts; this module does the work. A part
travels in pieces (mpitrain/waiting/pieces.py). A phase begins when the phase before it is complete.

Both algorithms need a power of two of ranks. For another number, p = q + r with q the largest power of two, the first
2r members of the group form pairs: the even one hands its buffer to the odd one. The odd one adds it to its own,
takes part for both on one seat, and hands the result back. Seven ranks, q = 4, r = 3:

    rank             0   1   2   3   4   5   6
    before           0 > 1   2 > 3   4 > 5
    among four           0       1       2   3
    after            0 < 1   2 < 3   4 < 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy

from mpitrain.allreduce.algorithm import Progress, Steps, in_phases
from mpitrain.allreduce.group import Group
from mpitrain.waiting.pieces import Mover

NOTHING = slice(0, 0)


class Phase(NamedTuple):
    """One rank's part in one phase. The slices are in elements; they are equal or disjoint."""

    partner: int
    send: slice
    receive: slice
    adds: bool  # add what is received to the values there; otherwise overwrite them


# The phases of the place `seat` among `power` seats, a power of two.
Seats = Callable[[int, int], Sequence[Phase]]


def steps_of(group: Group, plan: Callable[[int], Sequence[Phase]], tag: int) -> Steps:
    """The steps of an algorithm; `plan` gives the phases of this group member from the number of elements."""
    run = runner(group, tag)
    cached = lru_cache(maxsize=256)(plan)
    return lambda flat, residual=None: run(flat, cached(flat.size))


def runner(group: Group, tag: int) -> Callable[[numpy.ndarray, Sequence[Phase]], Progress]:
    """Runs phases on a buffer; the partners are places in the group."""
    mover = Mover(group.comm, tag)

    @in_phases
    def run(flat: numpy.ndarray, phases: Sequence[Phase]) -> Iterator[Progress]:
        for place, send, receive, adds in phases:
            partner = group.members[place]
            add = (_add_left if group.index < place else _add_right) if adds else None
            parts = [(partner, flat[send])], [(partner, flat[receive])]
            yield mover.move(*parts, add=add, same=send == receive)

    return run


def for_any_size(seats: Seats, place: int, size: int, before: slice, after: slice, *, adds: bool = True) -> list[Phase]:
    """The phases of the member at `place` among `size`, of any number.

    Args:
        seats: the phases for a power of two.
        before: the part that the even one of a pair hands over first.
        adds: True if the odd one adds that part to its own.
        after: the part that the even one gets back at the end.
    """
    power, rest = seating(size)
    is_paired = place < 2 * rest
    if is_paired and place % 2 == 0:
        return [Phase(place + 1, before, NOTHING, False), Phase(place + 1, NOTHING, after, False)]
    seat = place // 2 if is_paired else place - rest
    phases = [
        phase._replace(partner=2 * phase.partner + 1 if phase.partner < rest else phase.partner + rest)
        for phase in seats(seat, power)
    ]
    if is_paired:
        phases = [Phase(place - 1, NOTHING, before, adds), *phases, Phase(place - 1, after, NOTHING, False)]
    return phases


def seating(size: int) -> tuple[int, int]:
    """Return the largest power of two in `size`, which is the number of seats, and the rest: the seats of pairs."""
    power = 1 << (size.bit_length() - 1)
    return power, size - power


def _add_left(own: numpy.ndarray, arrived: numpy.ndarray) -> None:
    """Add to `own`, with the same bits as _add_right on the other side: the sum of two NaNs is the left one."""
    _add(own, arrived, own)


def _add_right(own: numpy.ndarray, arrived: numpy.ndarray) -> None:
    _add(arrived, own, own)


def _add(left: numpy.ndarray, right: numpy.ndarray, own: numpy.ndarray) -> None:
    # Infinity is a value like any other here; the caller checks the sum if it must be finite.
    with numpy.errstate(all="ignore"):
        # For single elements NumPy would use a reduction, with the overwritten operand on the left.
        if own.size == 1:
            own[0] = (left + right)[0]
        else:
            numpy.add(left, right, out=own)
