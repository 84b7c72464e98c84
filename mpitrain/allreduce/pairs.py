"""Allreduce in phases: in each one a rank exchanges a part of the buffer with one partner. What two algorithms share.

recursive_doubling.py and halving_doubling.py say who meets whom, with what; here it is done. A part travels in pieces,
some of them at a time, so that no message is a large one (over TCP those go one way at a time) and additions overlap
transfers. A phase begins when the one before it is complete.

Both algorithms are for a power of two of ranks. Of other numbers, p = q + r with q the largest power of two, the first
2r ranks stand in pairs: the even one hands its buffer to the odd one, which adds it to its own, takes part for both,
and hands the result back. Seven ranks, q = 4, r = 3:

    rank             0   1   2   3   4   5   6
    before           0 > 1   2 > 3   4 > 5
    among four           0       1       2   3
    after            0 < 1   2 < 3   4 < 5
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy

from mpitrain.allreduce.algorithm import Steps

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE_BYTES = 2**18
AHEAD = 4  # pieces posted for receiving, and at most in sending, at one time

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
    scratch = numpy.empty(0, numpy.uint8)

    def steps(flat: numpy.ndarray) -> Iterator[None]:
        nonlocal scratch
        needed = AHEAD * min(PIECE_BYTES, flat.nbytes)
        if scratch.size < needed:
            scratch = numpy.empty(needed, numpy.uint8)
        for phase in cached(flat.size):
            yield from _exchange(comm, flat, phase, scratch, tag)

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


def _exchange(comm: MPI.Comm, flat: numpy.ndarray, phase: Phase, scratch: numpy.ndarray, tag: int) -> Iterator[None]:
    partner, adds = phase.partner, phase.adds
    is_left = comm.rank < partner
    per_piece = min(PIECE_BYTES // flat.itemsize, flat.size)
    slots = [
        scratch[i * per_piece * flat.itemsize :][: per_piece * flat.itemsize].view(flat.dtype) for i in range(AHEAD)
    ]
    to_send, to_receive = _pieces(flat[phase.send], per_piece), _pieces(flat[phase.receive], per_piece)
    # Where a piece is added to what is being sent, that must have left.
    is_same = phase.send == phase.receive
    sends: deque[MPI.Request] = deque()
    receives: deque[tuple[MPI.Request, numpy.ndarray]] = deque()
    posted = received = started = sent = 0
    while received < len(to_receive) or sent < len(to_send):
        while posted < min(len(to_receive), received + AHEAD):
            piece = to_receive[posted]
            into = slots[posted % AHEAD][: piece.size] if adds else piece
            receives.append((comm.Irecv(into.view(numpy.uint8), partner, tag), into))
            posted += 1
        while started < min(len(to_send), sent + AHEAD):
            sends.append(comm.Isend(to_send[started].view(numpy.uint8), partner, tag))
            started += 1
        progress = False
        while sends and sends[0].Test():
            sends.popleft()
            sent += 1
            progress = True
        if receives and (not is_same or received < sent) and receives[0][0].Test():
            _, arrived = receives.popleft()
            if adds:
                _add(to_receive[received], arrived, is_left)
            received += 1
            progress = True
        if not progress:
            yield


def _add(mine: numpy.ndarray, arrived: numpy.ndarray, is_left: bool) -> None:
    """Add to `mine`, with the same bits on both sides: of two NaNs the sum is the left one."""
    left, right = (mine, arrived) if is_left else (arrived, mine)
    # Infinity is a value like any other here; whoever must not have it looks at the sum.
    with numpy.errstate(all="ignore"):
        # Where there is only one of each, NumPy takes it for a reduction, and what is overwritten for the left one.
        if mine.size == 1:
            mine[0] = (left + right)[0]
        else:
            numpy.add(left, right, out=mine)


def _pieces(part: numpy.ndarray, per_piece: int) -> list[numpy.ndarray]:
    return [part[begin : begin + per_piece] for begin in range(0, part.size, per_piece)]
