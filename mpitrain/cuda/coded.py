"""coded: sums compressed by a codec between nodes, encoded and decoded on the GPU, so that only wires go through the
CPU.

The two phases of direct.py. A rank adds the residual and encodes the others' segments on its GPU; the wires go down to
page-locked memory and out; what arrives goes up and is added there, and the sum takes the same way back:

    GPU      | encode 0 | encode 1 | ...         add_decoded         encode the sum          decode
    to host       | wires 0 | wires 1 | ...  ^                            | wire         ^
    network                | send, receive ..|                                | send ... |

Worked, two ranks with 1 2 and 10 20 and int8: rank 0 encodes its 2 and sends it, adds the 10 that comes to its 1, sends
11 and decodes it itself; rank 1 does the same for 22.

The pieces are those of window.py, the kernels give the same bits as the CPU codecs, and sums are made in the same
order: so results and residuals are bitwise identical to those of CPU arrays.

Inside a node, sums are exact, directly from the ranks' GPU memory (peer.py), and each rank's lane codes its segment. If
the ranks of a node cannot access each other's GPU memory, their gradients are summed on the CPU. Then the CPU also
codes them, and copies are uncompressed (ThroughHost in staged.py).

Cost a rank, of N bytes that the codec makes n of, m nodes: (m - 1)/m n down and up twice, where staged copies N each
way; an event looked at for each piece, twice. Source: as direct.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from mpitrain.allreduce.algorithm import Sequential, Steps
from mpitrain.allreduce.group import Group, lane
from mpitrain.allreduce.window import WINDOW, in_pieces, piece_bytes
from mpitrain.arrays import Array
from mpitrain.compression.codec import Codec
from mpitrain.cuda.device import cupy_module
from mpitrain.cuda.kernels import add, add_decoded, decode, encode, wire_bytes
from mpitrain.cuda.memory import address, allocating, pinned
from mpitrain.cuda.peer import no_sum, peer_steps
from mpitrain.cuda.sequential import DevicePlace, DeviceSequential, refuse
from mpitrain.cuda.staged import ThroughHost
from mpitrain.cuda.streams import happened, make_event
from mpitrain.cuda.transports import make_transport
from mpitrain.errors import DeviceError
from mpitrain.world.world import World

_ALIGNMENT = 256  # of wires in device memory: kernels need 4, copies are faster with more
_FLOAT32 = [numpy.dtype(numpy.float32)]


def coded(world: World, codec: Codec, host: Sequential) -> DeviceSequential | ThroughHost:
    """Make the compressed sum of float32 GPU arrays for the setting `transport`. Collective.

    Args:
        codec: a codec without kernels for GPUs runs on the CPU, with a message.
        host: the same sum for CPU arrays, in case the GPU cannot code.

    Returns:
        The sum that codes on the GPU, or else the one through the CPU.

    Raises:
        DeviceError: some rank has no GPU, or not the memory; or the requested transport cannot send compressed data or
            is not possible. Raised on every rank.
    """
    if world.num_nodes == 1:  # nothing is sent, so nothing is compressed
        return make_transport(world)
    asked, name = world.config.transport, codec.name
    if codec.device_code is None:
        through = ThroughHost(world, name, host)
        world.print(f"mpitrain: compression {name} has no kernels for GPUs: gradients are coded on the CPU")
        return through
    if asked not in ("auto", "peer", "staged"):
        why = f"it sends no compressed gradients; use auto, peer or staged with compression {name}, or no compression"
        refuse(world, asked, why)
    alone = world.num_nodes == world.size
    if alone or asked != "staged":
        place = DevicePlace(world)
        # Too little memory is an error, not a reason to use another path.
        between = coded_steps(world, place, lane(world), name)
        if alone and asked != "peer":
            return DeviceSequential(world, place, name, between, dtypes=_FLOAT32)
        try:
            steps, allocate = peer_steps(world, place, lambda _: between)
            return DeviceSequential(world, place, name, steps, allocate, _FLOAT32)
        except DeviceError as error:
            if asked == "peer" or not error.known_everywhere:
                raise
            world.print(f"mpitrain: compression {name} on the CPU, like the sums in a node: {error}")
    return ThroughHost(world, name, host)


def coded_steps(world: World, place: DevicePlace, group: Group | None, codec: str) -> Steps:
    """The two phases over the group. Collective in the world.

    `group` is None if this rank takes no part in a sum.
    """
    slots = _make_slots(world, place, group, codec)
    if group is None:
        return no_sum
    stream, runtime = place.stream, cupy_module().cuda.runtime
    members, others = group, range(1, group.size)

    def copy(target: int, source: int, num_bytes: int, kind: int) -> None:
        if num_bytes:
            runtime.memcpyAsync(target, source, num_bytes, kind, stream.ptr)

    def exchange(number: int, tag: int, flat: Array, parts: Sequence[slice], residual: Array | None) -> Iterator[bool]:
        """Do the same as `coded` in direct.py."""
        comm, rank, slot = members.comm, members.rank, slots[number]
        own = flat[parts[members.index]]

        def encoded(offset: int) -> numpy.ndarray:
            """The encoded bytes in CPU memory. They are complete once `slot.down` has happened."""
            part = parts[(members.index + offset) % members.size]
            values, error = flat[part], None
            if residual is not None:
                error = residual[part]
                add(values, error)
            size = wire_bytes(codec, values.size)
            on_device, on_host = slot.sent[offset][:size], slot.host_sent[offset][:size]
            encode(codec, values, on_device, error)
            copy(address(on_host), on_device.data.ptr, size, runtime.memcpyDeviceToHost)
            return on_host

        def lifted(offset: int, wire: numpy.ndarray) -> Array:
            on_device = slot.received[offset][: wire.size]
            copy(on_device.data.ptr, address(wire), wire.size, runtime.memcpyHostToDevice)
            return on_device

        # The data that arrived last in this slot may still be on its way to the GPU.
        yield from _over(lambda: happened(slot.up))
        size = wire_bytes(codec, own.size)
        arrived = [slot.host_received[offset][:size] for offset in others]
        receives = [comm.Irecv(into, rank(-offset), tag) for offset, into in zip(others, arrived, strict=True)]
        wires = [encoded(offset) for offset in others]
        slot.down.record(stream)
        yield from _over(lambda: happened(slot.down))
        sends = [comm.Isend(wire, rank(offset), tag) for offset, wire in zip(others, wires, strict=True)]
        for offset, receive, wire in zip(others, receives, arrived, strict=True):
            yield from _over(receive.Test)
            add_decoded(codec, lifted(offset, wire), own)
        total = encoded(0)
        slot.down.record(stream)
        decode(codec, slot.sent[0][: total.size], own)
        for send in sends:
            yield from _over(send.Test)
        # This also comes after all copies up, so that the received data may be overwritten.
        yield from _over(lambda: happened(slot.down))
        sends = [comm.Isend(total, rank(offset), tag + 1) for offset in others]
        places = [flat[parts[(members.index - offset) % members.size]] for offset in others]
        sums = [
            slot.host_received[offset][: wire_bytes(codec, segment.size)]
            for offset, segment in zip(others, places, strict=True)
        ]
        receives = [comm.Irecv(into, rank(-offset), tag + 1) for offset, into in zip(others, sums, strict=True)]
        for offset, receive, wire, segment in zip(others, receives, sums, places, strict=True):
            yield from _over(receive.Test)
            decode(codec, lifted(offset, wire), segment)
        slot.up.record(stream)
        for send in sends:
            yield from _over(send.Test)

    def length(count: int) -> int:
        return wire_bytes(codec, count)

    return in_pieces(members, exchange, length)


class _Slot(NamedTuple):
    """The memory that pieces with the same slot number use in turn; wires by the distance of the rank."""

    sent: list[Array]
    received: list[Array]
    host_sent: list[numpy.ndarray]
    host_received: list[numpy.ndarray]
    down: Any  # an event: the data to send is in CPU memory
    up: Any  # what has arrived is on the GPU


def _make_slots(world: World, place: DevicePlace, group: Group | None, codec: str) -> list[_Slot]:
    """Collective; none for a rank that sends nothing."""
    gpu, slots = place.gpu, []
    size = 0 if group is None or group.size == 1 else group.size
    length = -(-wire_bytes(codec, piece_bytes(group) // 4) // _ALIGNMENT) * _ALIGNMENT if group else 0
    with allocating(world, gpu, WINDOW * 2 * size * length, f"wires of {codec}"):
        for _ in range(WINDOW if size else 0):
            on_device = list(cupy_module().empty((2 * size, length), numpy.uint8))
            on_host = list(pinned(2 * size * length).reshape(2 * size, length))
            slots.append(
                _Slot(
                    on_device[:size],
                    on_device[size:],
                    on_host[:size],
                    on_host[size:],
                    make_event(gpu),
                    make_event(gpu),
                )
            )
    return slots


def _over(is_over: Callable[[], bool]) -> Iterator[bool]:
    """Yields False while an event has not happened, and True once when it has."""
    while not is_over():
        yield False
    yield True
