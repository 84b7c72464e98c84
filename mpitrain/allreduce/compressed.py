"""compressed: sums in a codec's format between nodes, exact inside a node. No entry of ALGORITHMS rounds like this.

Most codecs use direct.py. Others are gathered: every rank sends its whole encoded buffer to every other rank, and each
rank adds up all of them. This is for codecs whose sums have no short form: a sum of sparse values is less sparse.
Encoding it again would lose most of it once more.

Two ranks with 3 -5 and 1 4, each of which keeps its larger value:

    rank        0                   1
    sends       -5 in place 1       4 in place 1
    adds        0 -5, then 0 4      0 -5, then 0 4      in the order of the group, its own part too
    has         0 -1                0 -1
    keeps       3 0                 1 0                 for the next step

Every rank adds the same wires in the same order in float32, so all ranks end with the same bits.

Cost per rank: (p-1) n bytes sent and received in one latency, where n is the encoded size of the buffer; p buffers
decoded. direct.py with a codec costs 2(p-1)/p n. So with many nodes the codec must compress more.

Source: the exchange of Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, without
their server. Error feedback: as in direct.py. Segments travel in pieces, several of them at once: window.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy

from mpitrain.allreduce.algorithm import Progress, Sequential, Steps, in_phases
from mpitrain.allreduce.direct import Wires, direct_steps, done
from mpitrain.allreduce.group import Group
from mpitrain.allreduce.hierarchical import hierarchical_steps
from mpitrain.allreduce.shared_memory import NodeArrays
from mpitrain.allreduce.window import WINDOW, PieceSteps, piece_bytes, windowed
from mpitrain.arrays import Array
from mpitrain.compression.codec import Codec
from mpitrain.world.world import World


def gathered_steps(group: Group, codec: Codec) -> Steps:
    """For float32 only. The part of this rank's buffer that the codec does not send stays in the residual, if there is
    one."""
    others = range(1, group.size)
    wires = [Wires(piece_bytes(group), group.size, codec) for _ in range(WINDOW if group.size > 1 else 0)]

    @in_phases
    def exchange(
        slot: int, tag: int, flat: numpy.ndarray, parts: Sequence[slice], residual: numpy.ndarray | None
    ) -> Iterator[Iterator[bool]]:
        comm, rank = group.comm, group.rank
        values, size = flat[parts[0]], codec.wire_bytes(parts[0].stop - parts[0].start)
        arrived = [wire[:size] for wire in wires[slot].received]
        arrived[0] = wires[slot].sent[0][:size]
        receives = [comm.Irecv(arrived[offset], rank(-offset), tag) for offset in others]
        error = None
        if residual is not None:
            error = residual[parts[0]]
            with numpy.errstate(all="ignore"):
                numpy.add(values, error, out=values)
        codec.encode(values, arrived[0], error)
        sends = [comm.Isend(arrived[0], rank(offset), tag) for offset in others]
        for receive in receives:
            yield done(receive)
        for number in range(group.size):
            wire = arrived[(group.index - number) % group.size]
            if number:
                codec.add(wire, values)
            else:
                codec.decode(wire, values)
        for send in sends:
            yield done(send)

    return whole_pieces(group, exchange, codec.wire_bytes)


def whole_pieces(group: Group, exchange: PieceSteps, wire_bytes: Callable[[int], int]) -> Steps:
    """Run `exchange` on all pieces of a buffer that is not divided: a piece is the first of `parts`."""
    run = windowed(group, exchange, group.size, wire_bytes)  # p - 1 times the wire of a pth part, p times

    def steps(flat: Array, residual: Array | None = None) -> Progress:
        return run(flat, [flat.size] + [0] * (group.size - 1), residual)

    return steps


def compressed(world: World, codec: Codec) -> Sequential:
    """For float32 arrays only. See Algorithm for the contract, direct.py and the module for the rounding."""
    memory = NodeArrays(world)
    between = gathered_steps if codec.gathered else direct_steps
    steps = hierarchical_steps(world, memory, lambda group: between(group, codec))
    return Sequential(world, codec.name, steps, memory)
