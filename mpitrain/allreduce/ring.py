"""ring: reduce-scatter, then allgather, around a ring of ranks. No rank moves more bytes than necessary.

The buffer is cut into p segments, one a rank. Every rank sends only to its right neighbour, and receives only from its
left neighbour.

    0 --> 1 --> 2 --> 3 --> back to 0

Four ranks; a0 is rank 0's part of segment a, A the sum a0+a1+a2+a3. Reduce-scatter: in step t rank r sends segment
r-1-t and adds what it receives to segment r-2-t:

    rank        0               1               2               3
    start   a0 b0 c0 d0     a1 b1 c1 d1     a2 b2 c2 d2     a3 b3 c3 d3
    sends   d               a               b               c             step 0
    has     c30             d01             a12             b23           (c30 = c3+c0)
    sends   c               d               a               b             step 1
    has     b230            c301            d012            a123
    sends   b               c               d               a             step 2
    has     A               B               C               D

Rank r now has segment r complete. Allgather: the complete ones are passed on, three steps again, each received where it
belongs. Every segment was added up in one place and copied from there, so all ranks end with the same bits.

Cost a rank: each half p-1 steps and (p-1)/p of the buffer's bytes sent and received; together 2(p-1)/p, the minimum for
any allreduce; (p-1)/p of the elements added. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations, J. Parallel Distrib. Comput. 69 (2009) 117-124.

Segments travel in pieces. A piece is passed on as soon as it has been added, and the receives of the next pieces
are posted ahead, so additions overlap transfers and one step of the ring overlaps the next, also from one half to the
other. Piece sizes are equal on all ranks, so the whole is one numbered sequence of pieces: number j = step *
pieces_per_segment + piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy

from mpitrain.allreduce.algorithm import Piece, Progress, Sequential, Steps
from mpitrain.allreduce.costs import Topology, wire_seconds
from mpitrain.allreduce.group import Group, everyone, pieces_of, segments
from mpitrain.arrays import Array
from mpitrain.waiting.pieces import Combine, Mover, Receive, Send, add
from mpitrain.world.world import World

# Measured: see benchmarks/log/. Over TCP, MPI does not send and receive larger messages at the same time.
PIECE_BYTES = 256 * 1024
AHEAD = 8  # pieces that are posted for receiving, and at most being sent, at one time
_TAG = 1


class PieceStep(NamedTuple):
    """One number of the sequence: a piece of one segment goes right, a piece of another one comes from the left.

    Attributes:
        send: bytes of the buffer.
        after: how many pieces must be ready before it is sent.
        receive: elements of the buffer if it adds, else bytes.
        adds: whether what comes is added; else it overwrites.
        overwrites_after: how many pieces must have been sent before it may overwrite.
    """

    send: slice
    after: int
    receive: slice
    adds: bool
    overwrites_after: int


def ring(world: World) -> Sequential:
    """Pipelined ring over all ranks. See Algorithm for the contract."""
    return Sequential(world, "ring", ring_steps(everyone(world)))


def ring_seconds(num_bytes: int, topology: Topology) -> float:
    """2 (m-1) latencies and 2 (m-1)/m of the bytes over a link, for m nodes. Only for one rank per node."""
    nodes = topology.num_nodes
    if topology.most_ranks > 1:
        return math.inf
    return 2 * (nodes - 1) * topology.profile.latency_seconds + wire_seconds(num_bytes, topology)


def ring_steps(group: Group) -> Steps:
    """Run both halves as one sequence, in the order of the group's members. The second begins before the first ends."""
    both = around(group, Mover(group.comm, _TAG, AHEAD), reduces=True, gathers=True)
    return lambda flat, residual=None: both(flat)


def ring_reduce_scatter(group: Group) -> Piece:
    """The first half by itself: member i ends with part i complete; the other parts hold partial sums.

    Each rank sends and receives (p-1)/p of the bytes in p-1 steps.
    """
    return around(group, Mover(group.comm, _TAG, AHEAD), reduces=True, gathers=False)


def ring_allgather(group: Group) -> Piece:
    """The second half by itself: member i hands in part i, all end with all parts.

    Each rank sends and receives (p-1)/p of the bytes in p-1 steps.
    """
    return around(group, Mover(group.comm, _TAG, AHEAD), reduces=False, gathers=True)


def around(
    group: Group,
    mover: Mover,
    *,
    reduces: bool,
    gathers: bool,
    piece_bytes: int = PIECE_BYTES,
    add: Combine = add,
) -> Piece:
    """The first half, the second one, or both, on CPU or GPU arrays; `mover` is for the same kind."""
    left, right = group.rank(-1), group.rank(1)
    cached_plan = lru_cache(maxsize=256)(plan)

    def work(flat: Array, lengths: Sequence[int] | None = None) -> Progress:
        key = None if lengths is None else tuple(lengths)
        steps = cached_plan(flat.size, key, flat.itemsize, group.index, group.size, piece_bytes, reduces, gathers)
        octets = flat.view(numpy.uint8)
        sends: list[Send] = [(right, octets[send], after) for send, after, _, _, _ in steps]
        receives: list[Receive] = [
            (left, flat[place] if adds else octets[place], adds, overwrites_after)
            for _, _, place, adds, overwrites_after in steps
        ]
        return mover.run(sends, receives, add)

    return work


def plan(
    count: int,
    lengths: Sequence[int] | None,
    itemsize: int,
    index: int,
    size: int,
    piece_bytes: int,
    reduces: bool,
    gathers: bool,
) -> list[PieceStep]:
    """What the member at place `index` does, in the order in which pieces are sent and received.

    Every segment has as many pieces as the largest one, some of them possibly empty: a rank whose segment is empty must
    still pass on the others' pieces.
    """
    pieces = _pieces(count, lengths, size, max(1, piece_bytes // itemsize))
    per_segment = len(pieces[0])
    half = (size - 1) * per_segment
    result: list[PieceStep] = []
    for first, adds in [(index - 1, True)] * reduces + [(index, False)] * gathers:
        for step in range(size - 1):
            out, back = pieces[(first - step) % size], pieces[(first - step - 1) % size]
            for send, receive in zip(out, back, strict=True):
                number = len(result)
                # The first segment is this rank's own; every other one was received one step before.
                after = max(0, number - per_segment + 1)
                # The second half overwrites what was sent half a round before.
                overwrites_after = number - half + 1 if reduces and not adds else 0
                place = receive if adds else _in_bytes(receive, itemsize)
                result.append(PieceStep(_in_bytes(send, itemsize), after, place, adds, overwrites_after))
    return result


@lru_cache(maxsize=4)  # for simulations, which make the plans of all members
def _pieces(count: int, lengths: Sequence[int] | None, size: int, most: int) -> list[list[slice]]:
    """The pieces of each segment, of `most` elements at most."""
    parts = segments(count, size, lengths)
    longest = max(part.stop - part.start for part in parts)
    per_segment = max(1, -(-longest // most))
    return [pieces_of(part, per_segment) for part in parts]


def _in_bytes(part: slice, itemsize: int) -> slice:
    return slice(part.start * itemsize, part.stop * itemsize)
