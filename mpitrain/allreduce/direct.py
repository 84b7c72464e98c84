"""direct: every rank sends each segment straight to its owner, and the owner sends the sum straight to everybody.

The buffer is cut into p segments, one a rank. Two phases, each in one step, whatever p is:

    phase 1, reduce-scatter            phase 2, allgather
    a of 1, 2, 3 --> rank 0            A of rank 0 --> ranks 1, 2, 3
    b of 0, 2, 3 --> rank 1            B of rank 1 --> ranks 0, 2, 3
    c of 0, 1, 3 --> rank 2            ...
    d of 0, 1, 2 --> rank 3

Four ranks; a0 is rank 0's part of segment a, A the sum of all a:

    rank        0               1               2               3
    start   a0 b0 c0 d0     a1 b1 c1 d1     a2 b2 c2 d2     a3 b3 c3 d3
    gets    a3 a2 a1        b0 b3 b2        c1 c0 c3        d2 d1 d0        phase 1, from r-1, r-2, r-3
    has     A               B               C               D
    gets    D C B           A D C           B A D           C B A           phase 2, from r-1, r-2, r-3

Cost a rank: the bytes of the ring, 2(p-1)/p of the buffer, in 2(p-1) messages a piece, but only two latencies one after
the other where the ring has 2(p-1). So it is for buffers too small for the ring, and for wires that cannot be added up
on the way: with a codec each value is rounded twice only, once by each rank that sends its part and once by the owner
that sends the sum, while on the ring it would be rounded at every hop. The sum itself is made in float32.

Every segment is added up on one rank, in a fixed order, and all ranks (its owner too) take what the owner has sent: so
all end with the same bits.

Error feedback (Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback
fixes SignSGD, ICML 2019): what the codec leaves out is kept in `residual` and added to what is sent next time. For the
segments of others that is this rank's own error, for its own segment the error of the sum.

Segments travel in pieces; several pieces are on their way at once, and no rank starts one before it has finished the
one WINDOW before it, which also bounds what a slow rank must take in ahead of time.

Source: the two phases are those of Thakur, Rabenseifner and Gropp, Optimization of collective communication operations
in MPICH, Int. J. High Perform. Comput. Appl. 19 (2005) 49-66, with all exchanges of a phase at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import numpy

from mpitrain.allreduce.algorithm import DTYPES, Progress, Sequential, Steps
from mpitrain.allreduce.group import Group, everyone
from mpitrain.arrays import Array
from mpitrain.launch.activity import count_moved
from mpitrain.pace import Pace
from mpitrain.world import World, part_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.compression.codec import Codec

WINDOW = 4  # pieces on their way at one time
_FLIGHT_BYTES = 3 * 2**20  # of a window, both ways, before compression; bounds the scratch memory
_LARGEST_PIECE, _SMALLEST_PIECE = 256 * 1024, 16 * 1024
_TAG = 10  # and 2 WINDOW more


class Exchange(Protocol):
    """Both phases for one piece of every segment."""

    def __call__(
        self, slot: int, tag: int, flat: Array, parts: list[slice], residual: Array | None, /
    ) -> Iterator[bool]:
        """Yields whether anything has happened.

        Args:
            slot: below WINDOW; no two pieces that are on their way have the same one.
            tag: of its messages; the next one is free too.
            parts: the piece in `flat`, by the place in the group of the segment's owner.
        """
        ...


def direct(world: World) -> Sequential:
    """Two-step exchange between all ranks. See Algorithm for the contract."""
    return Sequential(world, "direct", direct_steps(everyone(world)))


def direct_steps(group: Group, codec: Codec | None = None) -> Steps:
    """The two phases over the group. With a codec: float32 only, rounded; see the module's docstring."""
    others = range(1, group.size)
    wires = [_Wires(piece_bytes(group), group.size, codec) for _ in range(WINDOW if group.size > 1 else 0)]

    def plain(slot: int, tag: int, flat: numpy.ndarray, parts: list[slice], _: numpy.ndarray | None) -> Iterator[bool]:
        """One piece of every segment, as it is."""
        comm, rank, own = group.comm, group.rank, parts[group.index]

        def at(offset: int) -> numpy.ndarray:
            return flat[parts[(group.index + offset) % group.size]].view(numpy.uint8)

        arrived = [wires[slot].of(offset, flat.dtype)[: own.stop - own.start] for offset in others]
        receives = [
            comm.Irecv(into.view(numpy.uint8), rank(-offset), tag) for offset, into in zip(others, arrived, strict=True)
        ]
        sends = [comm.Isend(at(offset), rank(offset), tag) for offset in others]
        for receive, values in zip(receives, arrived, strict=True):
            yield from _done(receive)
            with numpy.errstate(all="ignore"):
                numpy.add(flat[own], values, out=flat[own])
        # What was sent is overwritten now.
        for send in sends:
            yield from _done(send)
        receives = [comm.Irecv(at(-offset), rank(-offset), tag + 1) for offset in others]
        sends = [comm.Isend(at(0), rank(offset), tag + 1) for offset in others]
        for request in receives + sends:
            yield from _done(request)

    def coded(
        slot: int, tag: int, flat: numpy.ndarray, parts: list[slice], residual: numpy.ndarray | None
    ) -> Iterator[bool]:
        """The same in the codec's form, with error feedback where there is a residual."""
        assert codec is not None
        comm, rank, received, sent = group.comm, group.rank, wires[slot].received, wires[slot].sent
        own = flat[parts[group.index]]

        def encode(offset: int, wire: numpy.ndarray) -> numpy.ndarray:
            part = parts[(group.index + offset) % group.size]
            values, error = flat[part], None
            if residual is not None:
                error = residual[part]
                with numpy.errstate(all="ignore"):
                    numpy.add(values, error, out=values)
            wire = wire[: codec.wire_bytes(values.size)]
            codec.encode(values, wire, error)
            return wire

        size = codec.wire_bytes(own.size)
        arrived = [received[offset][:size] for offset in others]
        receives = [comm.Irecv(into, rank(-offset), tag) for offset, into in zip(others, arrived, strict=True)]
        sends = [comm.Isend(encode(offset, sent[offset]), rank(offset), tag) for offset in others]
        for receive, wire in zip(receives, arrived, strict=True):
            yield from _done(receive)
            codec.add(wire, own)
        total = encode(0, sent[0])
        for send in sends:
            yield from _done(send)
        sends = [comm.Isend(total, rank(offset), tag + 1) for offset in others]
        codec.decode(total, own)
        places = [flat[parts[(group.index - offset) % group.size]] for offset in others]
        sums = [received[offset][: codec.wire_bytes(place.size)] for offset, place in zip(others, places, strict=True)]
        receives = [comm.Irecv(into, rank(-offset), tag + 1) for offset, into in zip(others, sums, strict=True)]
        for receive, wire, place in zip(receives, sums, places, strict=True):
            yield from _done(receive)
            codec.decode(wire, place)
        for send in sends:
            yield from _done(send)

    return in_pieces(group, plain) if codec is None else in_pieces(group, coded, codec.wire_bytes)


def piece_bytes(group: Group) -> int:
    """How long a piece of a segment is at most; whole blocks of a codec."""
    fitting = min(max(_FLIGHT_BYTES // WINDOW // max(group.size - 1, 1), _SMALLEST_PIECE), _LARGEST_PIECE)
    return fitting - fitting % 1024


def in_pieces(group: Group, exchange: Exchange, wire_bytes: Callable[[int], int] | None = None) -> Steps:
    """`exchange` on all pieces of a buffer; `wire_bytes` says how long so many values are in a codec's form.

    Wherever `exchange` codes and adds, on the host or on a GPU, the pieces are the same, and so are the roundings.
    """
    longest = piece_bytes(group)
    pace = Pace()

    def steps(flat: Array, residual: Array | None = None) -> Progress:
        if group.size == 1:
            return
        largest = part_of(flat.size, 0, group.size)
        num_pieces = -(-(largest.stop - largest.start) * flat.itemsize // longest)
        started = 0
        active: dict[int, Iterator[bool]] = {}  # by slot: piece n has slot n modulo WINDOW, and its tag, on every rank
        share = flat.nbytes // group.size
        wire, wire_piece = share, min(share, longest)
        if wire_bytes is not None:
            wire, wire_piece = (wire_bytes(num_bytes // flat.itemsize) for num_bytes in (wire, wire_piece))
        pace.begin(2 * (group.size - 1) * wire, wire_piece)
        while True:
            while started < num_pieces and (slot := started % WINDOW) not in active:
                parts = [_piece(flat.size, owner, group.size, started, num_pieces) for owner in range(group.size)]
                active[slot] = exchange(slot, _TAG + 2 * slot, flat, parts, residual)
                started += 1
            if not active:
                break
            progress = False
            for slot, piece in tuple(active.items()):
                state = next(piece, None)
                if state is None:
                    del active[slot]
                progress |= state is not False
            if progress:
                count_moved()
            else:
                yield pace.nap()
        pace.end()

    return steps


class _Wires:
    """The scratch memory of one piece: what is received from each other rank, and what was encoded for it."""

    def __init__(self, piece_bytes: int, size: int, codec: Codec | None) -> None:
        num_bytes = piece_bytes if codec is None else codec.wire_bytes(piece_bytes // 4)
        self.received = [numpy.empty(num_bytes, numpy.uint8) for _ in range(size)]
        self.sent = [numpy.empty(num_bytes if codec else 0, numpy.uint8) for _ in range(size)]
        self._typed = {dtype: [slot.view(dtype) for slot in self.received] for dtype in ([] if codec else DTYPES)}

    def of(self, offset: int, dtype: numpy.dtype) -> numpy.ndarray:
        """What is received from the rank at that distance."""
        values: numpy.ndarray = self._typed[dtype][offset]
        return values


def _piece(count: int, owner: int, size: int, number: int, num_pieces: int) -> slice:
    """Piece `number` of the owner's segment; all segments have the same number of pieces, empty ones if need be."""
    segment = part_of(count, owner, size)
    part = part_of(segment.stop - segment.start, number, num_pieces)
    return slice(segment.start + part.start, segment.start + part.stop)


def _done(request: MPI.Request) -> Iterator[bool]:
    """Yields False while the request is under way, True once when it is done."""
    while not request.Test():
        yield False
    yield True
