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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from mpitrain.allreduce.algorithm import Sequential
from mpitrain.world import World, part_of

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE_BYTES = 1024 * 1024  # measured: see docs/log.md
AHEAD = 4  # pieces posted for receiving, and at most in sending, at one time
_TAG = 1


@dataclass(frozen=True)
class Piece:
    """What happens at one number of the sequence."""

    send: slice
    receive: slice
    add: bool  # received pieces are added in the first half, overwritten in the second


def ring(world: World) -> Sequential:
    """Pipelined ring over all ranks. See Algorithm for the contract."""
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    plans: dict[tuple[int, int], list[Piece]] = {}
    scratch = numpy.empty(AHEAD * PIECE_BYTES if world.size > 1 else 0, numpy.uint8)

    def steps(flat: numpy.ndarray) -> Iterator[None]:
        comm = world.comm
        piece_count = PIECE_BYTES // flat.itemsize
        key = (flat.size, piece_count)
        if key not in plans:
            plans[key] = plan(flat.size, piece_count, world.rank, world.size)
        pieces = plans[key]
        slots = [scratch[slot * PIECE_BYTES : (slot + 1) * PIECE_BYTES].view(flat.dtype) for slot in range(AHEAD)]
        # A send of the first segment waits for nothing; every other one for the piece one step before it.
        first_half = len(pieces) // 2
        free = first_half // (world.size - 1)
        bytes_of = flat.view(numpy.uint8)
        itemsize = flat.itemsize

        def message(part: slice) -> numpy.ndarray:
            return bytes_of[part.start * itemsize : part.stop * itemsize]

        sends: deque[MPI.Request] = deque()
        receives: deque[tuple[MPI.Request, numpy.ndarray | None]] = deque()
        started = posted = received = 0
        sent = 0  # sends that are complete: their memory may be overwritten
        while min(received, sent) < len(pieces):
            while posted < min(received + AHEAD, len(pieces)):
                piece = pieces[posted]
                if piece.add:
                    into = slots[posted % AHEAD][: piece.receive.stop - piece.receive.start]
                    receives.append((comm.Irecv(into.view(numpy.uint8), left, _TAG), into))
                elif posted - first_half < sent:
                    # Overwrites what was sent in the first half, which must have left by now.
                    receives.append((comm.Irecv(message(piece.receive), left, _TAG), None))
                else:
                    break
                posted += 1
            while started < min(received + free, len(pieces), sent + AHEAD):
                sends.append(comm.Isend(message(pieces[started].send), right, _TAG))
                started += 1
            progress = False
            while sends and sends[0].Test():
                sends.popleft()
                sent += 1
                progress = True
            if receives and receives[0][0].Test():
                _, values = receives.popleft()
                if values is not None:
                    total = flat[pieces[received].receive]
                    # Infinity is a value like any other here; whoever must not have it looks at the sum.
                    with numpy.errstate(all="ignore"):
                        numpy.add(total, values, out=total)
                received += 1
                progress = True
            if not progress:
                yield

    return Sequential(world, "ring", steps)


def plan(count: int, piece_count: int, rank: int, size: int) -> list[Piece]:
    """The pieces of a buffer of `count` elements in the order in which they are sent and received.

    Every segment has as many pieces as the largest one, empty ones if need be: a rank whose segment is empty must
    still pass on the others' pieces.
    """
    segments = [part_of(count, owner, size) for owner in range(size)]
    per_segment = max(1, -(-(segments[0].stop - segments[0].start) // piece_count))

    def pieces_of(owner: int) -> list[slice]:
        segment = segments[owner % size]
        parts = (part_of(segment.stop - segment.start, piece, per_segment) for piece in range(per_segment))
        return [slice(segment.start + part.start, segment.start + part.stop) for part in parts]

    result: list[Piece] = []
    for first, add in ((rank, True), (rank + 1, False)):
        for step in range(size - 1):
            sent, received = pieces_of(first - step), pieces_of(first - step - 1)
            result += [Piece(send, receive, add) for send, receive in zip(sent, received, strict=True)]
    return result
