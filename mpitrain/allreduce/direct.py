"""direct: every rank sends each segment directly to its owner, and the owner sends the sum directly to all ranks.

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

Cost per rank: the bytes of the ring, 2(p-1)/p of the buffer, in 2(p-1) messages per piece, but only two latencies one
after the other instead of the ring's 2(p-1). So direct is for buffers that are too small for the ring, and for encoded
values, which cannot be added up on the way. With a codec, each value is rounded only twice: by each rank that sends its
part, and by the owner that sends the sum. On the ring each hop would round it. The sum itself is computed in float32.

Every segment is added up on one rank, in a fixed order, and all ranks (including its owner) take what the owner has
sent. So all ranks end with the same bits.

Error feedback (Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback
fixes SignSGD, ICML 2019): what the codec does not send stays in `residual`, and is added to what is sent the next time.
For the segments of others this is the rank's own error, for its own segment the error of the sum.

Segments travel in pieces, several of them at once: window.py.

Source: the two phases are those of Thakur, Rabenseifner and Gropp, Optimization of collective communication operations
in MPICH, Int. J. High Perform. Comput. Appl. 19 (2005) 49-66, with all exchanges of a phase at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy

from mpitrain.allreduce.algorithm import AddAll, Piece, Sequential, Steps, in_phases
from mpitrain.allreduce.costs import Topology, wire_seconds
from mpitrain.allreduce.group import Group, everyone
from mpitrain.allreduce.window import WINDOW, PieceSteps, in_pieces, piece_bytes, windowed
from mpitrain.arrays import Array
from mpitrain.waiting.pieces import add
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.compression.codec import Codec

_UNEVEN = 0.04  # of the time on the wire, lost if several senders share a receiver's link; measured


def direct(world: World) -> Sequential:
    """Two-step exchange between all ranks. See Algorithm for the contract."""
    return Sequential(world, "direct", direct_steps(everyone(world)))


def direct_seen(world: World, add_all: AddAll) -> Sequential:
    """The same, with the addition given."""
    return Sequential(world, "direct", direct_steps(everyone(world), add_all=add_all))


def direct_seconds(num_bytes: int, topology: Topology) -> float:
    """Two latencies and 2 (m-1)/m of the bytes over a link, for m nodes. For one rank per node only."""
    if topology.most_ranks > 1:
        return math.inf
    uneven = 1 + _UNEVEN * (topology.num_nodes > 2)
    return 2 * topology.profile.latency_seconds + wire_seconds(num_bytes, topology) * uneven


def direct_steps(group: Group, codec: Codec | None = None, add_all: AddAll | None = None) -> Steps:
    """Run both phases, one after the other for each piece. With a codec: float32 only, rounded; see the module.

    `add_all` adds up all summands of a part once they have arrived; default: they are added one by one on arrival.
    """
    if codec is not None:
        return in_pieces(group, _coded(group, codec), codec.wire_bytes)
    reduce, gather = _reduce(group, add_all), _gather(group)

    @in_phases
    def exchange(
        slot: int, tag: int, flat: Array, parts: Sequence[slice], residual: Array | None
    ) -> Iterator[Iterator[bool]]:
        yield reduce(slot, tag, flat, parts, residual)
        yield gather(slot, tag + 1, flat, parts, residual)

    return in_pieces(group, exchange)


def direct_reduce_scatter(group: Group) -> Piece:
    """The first phase by itself. Only this rank's part changes.

    Each rank sends and receives (p-1)/p of the bytes, with one latency.
    """
    run = windowed(group, _reduce(group), phases=1)
    return lambda flat, lengths=None: run(flat, lengths)


def direct_allgather(group: Group) -> Piece:
    """The second phase by itself.

    Each rank sends its part p-1 times and receives the others' parts, with one latency.
    """
    run = windowed(group, _gather(group), phases=1)
    return lambda flat, lengths=None: run(flat, lengths)


def _reduce(group: Group, add_all: AddAll | None = None) -> PieceSteps:
    """Phase 1 of one piece of every segment."""
    comm, rank, others = group.comm, group.rank, range(1, group.size)
    wires = [Wires(piece_bytes(group), group.size, None) for _ in range(WINDOW if group.size > 1 else 0)]

    @in_phases
    def exchange(
        slot: int, tag: int, flat: numpy.ndarray, parts: Sequence[slice], _: Array | None
    ) -> Iterator[Iterator[bool]]:
        total = flat[parts[group.index]]
        received = wires[slot].received
        arrived = [received[offset][: total.nbytes] for offset in others]
        receives = [comm.Irecv(into, rank(-offset), tag) for offset, into in zip(others, arrived, strict=True)]
        sends = [
            comm.Isend(flat[parts[(group.index + offset) % group.size]].view(numpy.uint8), rank(offset), tag)
            for offset in others
        ]
        for receive, octets in zip(receives, arrived, strict=True):
            yield done(receive)
            if add_all is None:
                add(total, octets.view(flat.dtype))
        if add_all is not None:
            add_all([total, *(octets.view(flat.dtype) for octets in arrived)], total)
        # From here on, the sent values may be overwritten.
        for send in sends:
            yield done(send)

    return exchange


def _gather(group: Group) -> PieceSteps:
    """Phase 2 of one piece of every segment."""
    comm, rank, others = group.comm, group.rank, range(1, group.size)

    @in_phases
    def exchange(
        _slot: int, tag: int, flat: numpy.ndarray, parts: Sequence[slice], _: Array | None
    ) -> Iterator[Iterator[bool]]:
        def at(offset: int) -> numpy.ndarray:
            return flat[parts[(group.index + offset) % group.size]].view(numpy.uint8)

        receives = [comm.Irecv(at(-offset), rank(-offset), tag) for offset in others]
        sends = [comm.Isend(at(0), rank(offset), tag) for offset in others]
        for request in receives + sends:
            yield done(request)

    return exchange


def _coded(group: Group, codec: Codec) -> PieceSteps:
    """Run both phases of one piece of every segment in the codec's form, with error feedback if there is a residual."""
    others = range(1, group.size)
    wires = [Wires(piece_bytes(group), group.size, codec) for _ in range(WINDOW if group.size > 1 else 0)]

    @in_phases
    def coded(
        slot: int, tag: int, flat: numpy.ndarray, parts: Sequence[slice], residual: numpy.ndarray | None
    ) -> Iterator[Iterator[bool]]:
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
            yield done(receive)
            codec.add(wire, own)
        total = encode(0, sent[0])
        for send in sends:
            yield done(send)
        sends = [comm.Isend(total, rank(offset), tag + 1) for offset in others]
        codec.decode(total, own)
        places = [flat[parts[(group.index - offset) % group.size]] for offset in others]
        sums = [received[offset][: codec.wire_bytes(place.size)] for offset, place in zip(others, places, strict=True)]
        receives = [comm.Irecv(into, rank(-offset), tag + 1) for offset, into in zip(others, sums, strict=True)]
        for receive, wire, place in zip(receives, sums, places, strict=True):
            yield done(receive)
            codec.decode(wire, place)
        for send in sends:
            yield done(send)

    return coded


class Wires:
    """The scratch memory of one piece: the data received from each other rank, and the data encoded for it."""

    def __init__(self, piece_bytes: int, size: int, codec: Codec | None) -> None:
        num_bytes = piece_bytes if codec is None else codec.wire_bytes(piece_bytes // 4)
        self.received = [numpy.empty(num_bytes, numpy.uint8) for _ in range(size)]
        self.sent = [numpy.empty(num_bytes if codec else 0, numpy.uint8) for _ in range(size)]


def done(request: MPI.Request) -> Iterator[bool]:
    """Yields False while the request is under way, True once when it is done."""
    while not request.Test():
        yield False
    yield True
