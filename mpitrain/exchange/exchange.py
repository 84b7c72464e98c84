"""An Exchange hands out slots, and turns what is in them into the weighted mean over ranks."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol
from weakref import WeakSet

import numpy

from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.allreduce.compressed import compressed
from mpitrain.allreduce.costs import compression as compression_by
from mpitrain.allreduce.device import make_transport
from mpitrain.allreduce.device.coded import Coded, coded
from mpitrain.allreduce.device.sequential import DeviceSequential
from mpitrain.allreduce.group import num_lanes
from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.compression import CODECS, make_codec
from mpitrain.cuda import kernels
from mpitrain.cuda.memory import allocating
from mpitrain.cuda.streams import working_on
from mpitrain.errors import ConfigError, DataError, everywhere
from mpitrain.exchange.slot import Slot, check_slot
from mpitrain.world import World


class Exchange(Protocol):
    """What a GradientReducer needs of it.

    Attributes:
        may_overflow: finite gradients may have an infinite mean.
        division: which ranks of a node leave out what, in a word; "": by whole buckets.
    """

    may_overflow: bool

    @property
    def division(self) -> str: ...

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False) -> Slot:
        """A slot for `count` elements, on the host or on this rank's GPU; its array is uninitialised. Collective."""
        ...

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        """Begin to replace `slot.flat[part]` by the sum over ranks of share x that part; same bits on every rank.

        Every rank calls this with the same part, in the same order. The work is in the queue of the World that the
        exchange was made for (a GradientReducer drives that queue), as the work of every Algorithm of this World is.

        Args:
            slot: from `allocate` of this exchange, of a floating dtype. What is left out of the part is kept in the
                same part of the slot's residual, and added to the next sum of that part.
            part: of step 1. No two parts of a slot whose sums are under way may overlap.
            share: this rank's weight divided by the sum of all ranks' weights. Where it is 0 the content of the part
                is not looked at.

        Raises:
            ValueError: the slot is not from `allocate` of this exchange.
        """
        ...

    def reset(self) -> None:
        """Forget what is kept from step to step, in all slots. No sum may be under way."""
        ...


class PlainExchange:
    """Every element as it is, by an allreduce."""

    may_overflow = False
    division = ""

    def __init__(self, world: World, algorithm: str | None = None, transport: str | None = None) -> None:
        """
        Args:
            world: whose ranks take part.
            algorithm: for host arrays, a name in ALGORITHMS; default: the world's setting.
            transport: for device arrays, a name in TRANSPORTS; default: the world's setting.
        """
        self._world = world
        self._algorithm = make_algorithm(world, algorithm)
        self._transport_name = transport
        self._slots: WeakSet[Slot] = WeakSet()

    @cached_property
    def _transport(self) -> DeviceSequential:
        """Made when the first device array is allocated: that is collective, and needs a GPU."""
        return make_transport(self._world, self._transport_name)

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False) -> Slot:
        """See Exchange.

        Raises:
            DeviceError: some rank has no GPU, or not the memory. On every rank.
        """
        slot = Slot((self._transport if on_device else self._algorithm).allocate(count, dtype))
        self._slots.add(slot)
        return slot

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        """See Exchange. The shares add up to 1, so no sum can overflow."""
        check_slot(self._world, self._slots, slot)
        flat = slot.flat[part]
        scale(flat, share)
        return (self._transport if is_device_array(flat) else self._algorithm).start(flat, agreed=True)

    def reset(self) -> None:
        """See Exchange. Nothing is kept."""


class CompressedExchange:
    """float32 in a codec's shorter form where it crosses the network, with error feedback; in full inside a node.

    What the codec leaves out of a gradient is kept in its slot, and added to the same gradient of the next step: see
    mpitrain/allreduce/direct.py. A step that ends with an error may lose it, which costs no more than that step's
    rounding.

    Arrays on a GPU are coded there, and what is left out stays there, wherever it can be: see
    mpitrain/allreduce/device/coded.py.
    """

    def __init__(self, world: World, codec: str) -> None:
        """`codec` is a name in mpitrain.compression.CODECS. On one node nothing is shortened, and a line says so."""
        self._codec = make_codec(codec)
        self.may_overflow = self._codec.may_overflow and world.num_nodes > 1
        self._world = world
        self._algorithm = compressed(world, self._codec)
        self._slots: WeakSet[Slot] = WeakSet()
        if world.num_nodes == 1:
            world.print(f"mpitrain: compression {codec}: all ranks are on one node, so nothing is sent and shortened")

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False) -> Slot:
        """See Exchange.

        Raises:
            ConfigError: `dtype` is not float32.
            DeviceError: some rank has no GPU, or not the memory. On every rank.
        """
        if dtype != numpy.float32:
            raise everywhere(
                ConfigError(
                    f"compression {self._codec.name} shortens float32 gradients; the model has gradients of {dtype}. "
                    "Make its parameters float32, or leave compression out"
                )
            )
        flat = (self._on_device.transport if on_device else self._algorithm).allocate(count, dtype)
        if on_device and self._on_device.codes_on_device:
            place = self._on_device.transport.place
            with (
                allocating(self._world, place.gpu, flat.nbytes, "what a codec leaves out"),
                working_on(place.gpu, place.stream),
            ):
                slot = Slot(flat, namespace(flat).zeros(count, numpy.float32), place)
        else:
            # Pages that are never touched, of what other ranks of the node take care of, take no memory.
            slot = Slot(flat, numpy.zeros(count, numpy.float32))
        self._slots.add(slot)
        return slot

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        """See Exchange."""
        check_slot(self._world, self._slots, slot)
        assert slot.residual is not None
        flat = slot.flat[part]
        scale(flat, share)
        algorithm = self._on_device.transport if is_device_array(flat) else self._algorithm
        return algorithm.start(flat, slot.residual[part], agreed=True)

    def reset(self) -> None:
        """See Exchange: what the codec has left out."""
        for slot in self._slots:
            slot.clear()

    @property
    def division(self) -> str:
        """See Exchange."""
        # A GPU's array that is coded on the host goes there in pieces, and each piece is dealt out.
        by_pieces = any(is_device_array(slot.flat) and slot.place is None for slot in self._slots)
        return "pieces of staged" if by_pieces else ""

    @cached_property
    def _on_device(self) -> Coded:
        """Made when the first device array is allocated: that is collective, and needs a GPU."""
        return coded(self._world, self._codec, self._algorithm)


def make_exchange(world: World, algorithm: str | None = None, compression: str | None = None) -> Exchange:
    """The exchange that the world's settings, or the arguments, ask for. Collective.

    Raises:
        ConfigError: there is no algorithm or compression of that name, or the two exclude each other.
        MismatchError: the ranks ask for different ones.
    """
    compression = world.config.compression if compression is None else compression
    check_compression(compression)
    world.agree("make an exchange", [f"compression {compression}", f"algorithm {algorithm}"])
    if compression == "auto":
        compression = _by_profile(world)
    if compression == "none":
        return PlainExchange(world, algorithm)
    if algorithm is not None:
        raise ConfigError(f"compression={compression} chooses its algorithm itself; leave out algorithm={algorithm}")
    return CompressedExchange(world, compression)


def check_compression(name: str) -> None:
    """Raise ConfigError unless it can be a setting."""
    known = [*sorted(CODECS), "auto", "none"]
    if name not in known:
        raise ConfigError(f"there is no compression {name!r}; known: {', '.join(known)}")


def _by_profile(world: World) -> str:
    """bf16 where it pays; a line says what was chosen and why."""
    chosen = compression_by(world.profile, world.num_nodes, num_lanes(world))
    rate = world.profile.bytes_per_second / 1e6
    reason = f"{world.num_nodes} nodes, {rate:.0f} MB/s between them ({world.profile.origin})"
    if world.num_nodes > 1 and not world.profile.is_measured:
        reason = "the network is not known; measure it: mpitrain bench --save-profile FILE, then MPITRAIN_PROFILE=FILE"
    world.print(f"mpitrain: compression auto: {chosen}; {reason}")
    return chosen


def scale(flat: Array, share: float) -> None:
    """Multiply `flat`, of a floating dtype, by `share` in place; rounds once, also where the dtype is a short one."""
    if share == 0.0:
        flat.fill(0)  # not multiplied: 0 x NaN is NaN
    elif share != 1.0 and is_device_array(flat):
        kernels.scale(flat, share)
    elif share != 1.0:
        # A share rounded to 16 bits would be off by more than a sum is: multiply in float32 at least.
        dtype = flat.dtype if flat.itemsize > 2 else numpy.dtype(numpy.float32)
        numpy.multiply(flat, share, out=flat, casting="same_kind", dtype=dtype)


def share_of(world: World, weights: list[float]) -> tuple[float, float]:
    """This rank's part of a mean, and the sum of the weights of all ranks, given by rank.

    Raises:
        DataError: on every rank: a weight is negative or not finite, or all are 0.
    """
    total = sum(weights)
    if min(weights) >= 0 and 0 < total < float("inf"):
        return weights[world.rank] / total, total
    problem = "the weight is 0 on every rank: there is nothing to take the mean of"
    for rank, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            problem = f"{world.name(rank)} has weight {weight}; a weight is a number of samples, 0 or more"
            break
    else:
        if total > 0:
            problem = f"the weights of all ranks add up to {total}; a weight is a number of samples"
    raise everywhere(DataError(problem))
