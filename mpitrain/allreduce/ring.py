"""ring: reduce-scatter, then allgather, around a ring of ranks; nobody moves more bytes than it must.

The buffer is cut into p segments, one a rank. Every rank sends to its right neighbour only, and receives from its
left one only.

    0 --> 1 --> 2 --> 3 --> back to 0

Four ranks; a0 is rank 0's part of segment a, A the sum a0+a1+a2+a3. In step t of the first half rank r sends
segment r-t and adds what it receives to segment r-t-1:

    rank        0               1               2               3
    start   a0 b0 c0 d0     a1 b1 c1 d1     a2 b2 c2 d2     a3 b3 c3 d3
    sends   a               b               c               d             step 0
    has     d30             a01             b12             c23           (d30 = d3+d0)
    sends   d               a               b               c             step 1
    has     c230            d301            a012            b123
    sends   c               d               a               b             step 2
    has     B               C               D               A

Each rank now owns one complete segment. The second half passes the complete ones on, three steps again, each
received where it belongs. Every segment was added up in one place and copied from there, so all ranks end with the
same bits.

Cost a rank: 2(p-1) steps and 2(p-1)/p of the buffer's bytes sent and received, the least any allreduce can; (p-1)/p
of the elements added. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
workstations, J. Parallel Distrib. Comput. 69 (2009) 117-124.

Segments travel in pieces. A piece is passed on as soon as it has been added, and the receives of the next pieces
are posted ahead, so additions overlap transfers and one step of the ring overlaps the next. Piece sizes are equal on
all ranks, so the whole is one numbered sequence of pieces: number j = step * pieces_per_segment + piece.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy

from mpitrain.allreduce.algorithm import DTYPES, Progress, Sequential, Steps
from mpitrain.allreduce.group import Group, everyone
from mpitrain.launch.activity import count_moved
from mpitrain.pace import Pace
from mpitrain.world import World, part_of

if TYPE_CHECKING:
    from mpi4py import MPI

# Measured: see docs/log.md. A larger message would go over TCP in a way that does not send and receive at once.
PIECE_BYTES = 256 * 1024
AHEAD = 8  # pieces posted for receiving, and at most in sending, at one time
_TAG = 1


class Piece(NamedTuple):
    """What happens at one number of the sequence. The slices are in bytes of the buffer."""

    send: slice
    receive: slice
    add: slice | None  # in elements: where to add what was received; None in the second half, which overwrites


def ring(world: World) -> Sequential:
    """Pipelined ring over all ranks. See Algorithm for the contract."""
    return Sequential(world, "ring", ring_steps(everyone(world)))


def ring_steps(group: Group) -> Steps:
    """The ring in the order of the group's members."""
    comm, left, right = group.comm, group.rank(-1), group.rank(1)
    cached_plan = lru_cache(maxsize=256)(plan)
    scratch = [numpy.empty(PIECE_BYTES if group.size > 1 else 0, numpy.uint8) for _ in range(AHEAD)]
    # What has been received, by slot and dtype, ready to be added.
    typed = {dtype: [slot.view(dtype) for slot in scratch] for dtype in DTYPES}
    pace = Pace()

    def steps(flat: numpy.ndarray, _residual: numpy.ndarray | None = None) -> Progress:
        if group.size == 1:
            return
        pieces = cached_plan(flat.size, flat.itemsize, group.index, group.size)
        buffer, arrived = flat.view(numpy.uint8), typed[flat.dtype]
        num_pieces, half = len(pieces), len(pieces) // 2
        # A piece of the first segment waits for nothing to be sent; every other one for the piece one step before.
        free = half // (group.size - 1)
        sends: deque[MPI.Request] = deque()
        receives: deque[MPI.Request] = deque()
        started = posted = 0
        sent = received = 0  # sends that are complete: their memory may be overwritten; receives that are dealt with
        share = flat.nbytes // group.size
        pace.begin(2 * (group.size - 1) * share, min(share, PIECE_BYTES))
        while min(received, sent) < num_pieces:
            while posted < num_pieces and posted < received + AHEAD:
                _, receive, add = pieces[posted]
                if add is not None:
                    into = scratch[posted % AHEAD][: receive.stop - receive.start]
                elif posted - half < sent:
                    # Overwrites what was sent half a round before, and has left by now.
                    into = buffer[receive]
                else:
                    break
                receives.append(comm.Irecv(into, left, _TAG))
                posted += 1
            while started < num_pieces and started < received + free and started < sent + AHEAD:
                sends.append(comm.Isend(buffer[pieces[started].send], right, _TAG))
                started += 1
            progress = False
            if receives and receives[0].Test():
                receives.popleft()
                add = pieces[received].add
                if add is not None:
                    total = flat[add]
                    # Infinity is a value like any other here; whoever must not have it looks at the sum.
                    with numpy.errstate(all="ignore"):
                        numpy.add(total, arrived[received % AHEAD][: total.size], out=total)
                received += 1
                progress = True
            while sends and sends[0].Test():
                sends.popleft()
                sent += 1
                progress = True
            if progress:
                count_moved()
            else:
                yield pace.nap()
        pace.end()

    return steps


def plan(count: int, itemsize: int, rank: int, size: int, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of a buffer of `count` elements in the order in which they are sent and received.

    Every segment has as many pieces as the largest one, empty ones if need be: a rank whose segment is empty must
    still pass on the others' pieces.
    """
    segments = [part_of(count, owner, size) for owner in range(size)]
    per_segment = max(1, -(-(segments[0].stop - segments[0].start) // (piece_bytes // itemsize)))

    def pieces_of(owner: int) -> list[slice]:
        segment = segments[owner % size]
        parts = (part_of(segment.stop - segment.start, piece, per_segment) for piece in range(per_segment))
        return [slice(segment.start + part.start, segment.start + part.stop) for part in parts]

    def in_bytes(part: slice) -> slice:
        return slice(part.start * itemsize, part.stop * itemsize)

    result: list[Piece] = []
    for first, adds in ((rank, True), (rank + 1, False)):
        for step in range(size - 1):
            for send, receive in zip(pieces_of(first - step), pieces_of(first - step - 1), strict=True):
                result.append(Piece(in_bytes(send), in_bytes(receive), receive if adds else None))
    return result
