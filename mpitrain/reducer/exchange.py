"""An Exchange makes slots, and replaces the values in them by the weighted mean over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Protocol
from weakref import WeakSet

import numpy

from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.allreduce.compressed import compressed
from mpitrain.allreduce.costs import compression as compression_by
from mpitrain.allreduce.exact import ExactSum, check_reduction, exact_sum
from mpitrain.allreduce.group import num_lanes
from mpitrain.arrays import is_device_array, namespace
from mpitrain.collectives.shares import scale
from mpitrain.compression import check_compression, make_codec, power_sgd
from mpitrain.cuda.coded import coded
from mpitrain.cuda.memory import allocating
from mpitrain.cuda.sequential import DeviceSequential
from mpitrain.cuda.staged import ThroughHost
from mpitrain.cuda.streams import working_on
from mpitrain.cuda.transports import exact_staged, make_transport
from mpitrain.errors import ConfigError, everywhere
from mpitrain.reducer.checks import check_plain
from mpitrain.reducer.low_rank import LowRankExchange
from mpitrain.reducer.slot import Slot, Tensors, check_slot
from mpitrain.world.world import World

OTHERS = ("auto", "none")  # settings of `compression` beside names of compression


class Exchange(Protocol):
    """The interface that a GradientReducer needs.

    Attributes:
        may_overflow: the mean of finite gradients may be infinite.
        division: a word for how the ranks of a node divide the codec's residual; "": by whole buckets.
    """

    may_overflow: bool
    division: str

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False, tensors: Tensors = ()) -> Slot:
        """Make a slot for `count` elements, on the CPU or on this rank's GPU; uninitialised. Collective.

        Args:
            tensors: name and shape of the tensors in the slot, in order and without gaps, if known.
        """
        ...

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        """Begin to replace `slot.flat[part]` by the sum over ranks of share x that part; equal bits on every rank.

        Every rank calls this with the same part, in the same order. The work enters the queue of the World that the
        exchange was made for, like the work of every Algorithm of this World. A GradientReducer drives that queue.

        Args:
            slot: from `allocate` of this exchange, of a floating dtype. What a codec does not send of the part stays in
                the same part of the slot's residual, and is added to the next sum of that part.
            part: a slice with step 1. Parts of a slot with sums under way must not overlap.
            share: this rank's weight divided by the sum of all ranks' weights. If it is 0, the content of the part is
                ignored.

        Raises:
            ValueError: the slot is not from `allocate` of this exchange.
        """
        ...

    def reset(self) -> None:
        """Clear the state that all slots keep from step to step. No sum may be under way."""
        ...


class PlainExchange:
    """Exchanges every element unchanged, by an allreduce."""

    may_overflow = False
    division = ""

    def __init__(
        self,
        world: World,
        algorithm: str | None = None,
        transport: str | None = None,
        *,
        reduction: str | None = None,
    ) -> None:
        """
        Args:
            world: the World whose ranks take part.
            algorithm: for CPU arrays, a name in ALGORITHMS; default: the world's setting.
            transport: for GPU arrays, a name in TRANSPORTS; default: the world's setting.
            reduction: a name in REDUCTIONS; default: the world's setting.
        """
        self._world = world
        reduction = world.config.reduction if reduction is None else reduction
        self._algorithm = (exact_sum if reduction == "exact" else make_algorithm)(world, algorithm)
        self._transport_name = transport
        self._slots: WeakSet[Slot] = WeakSet()

    @cached_property
    def _transport(self) -> DeviceSequential:
        """The algorithm for device arrays, made with the first device slot: this is collective, and needs a GPU."""
        if isinstance(self._algorithm, ExactSum):
            return exact_staged(self._world, self._algorithm, self._transport_name)
        return make_transport(self._world, self._transport_name)

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False, tensors: Tensors = ()) -> Slot:
        """See Exchange.

        Raises:
            DeviceError: a rank has no GPU, or too little memory on it; raised on every rank.
        """
        slot = Slot((self._transport if on_device else self._algorithm).allocate(count, dtype))
        self._slots.add(slot)
        return slot

    def mean(
        self, slot: Slot, part: slice, share: float, others: Sequence[numpy.ndarray] | None = None
    ) -> AllreduceHandle:
        """See Exchange. The shares add up to 1, so no sum can overflow.

        `others` are further summands of this rank, for an exact sum of host arrays: see ExactSum.start.
        """
        check_slot(self._world, self._slots, slot)
        flat = slot.flat[part]
        scale(flat, share)
        if isinstance(self._algorithm, ExactSum) and not is_device_array(flat):
            return self._algorithm.start(flat, agreed=True, others=others)
        return (self._transport if is_device_array(flat) else self._algorithm).start(flat, agreed=True)

    def reset(self) -> None:
        """See Exchange. Nothing is kept here."""


class CompressedExchange:
    """Sends float32 compressed by a codec over the network, with error feedback; uncompressed inside a node.

    The slot keeps the codec's residual of a gradient, and adds it to the same gradient in the next step; see
    mpitrain/allreduce/direct.py. A step that ends with an error may lose this residual, which costs no more than that
    step's rounding.

    Arrays on a GPU are coded there, and their residuals stay there, wherever possible; see mpitrain/cuda/coded.py.
    """

    division = ""

    def __init__(self, world: World, codec: str, decay: float = 1.0) -> None:
        """On one node nothing is compressed, and a message reports this.

        Args:
            codec: a name for make_codec.
            decay: the factor by which the residual is multiplied at each sum; 1: nothing of it is lost.

        Raises:
            ConfigError: the world's settings ask for exact sums. Raised on every rank.
        """
        check_plain(world.config.reduction, codec)
        self._codec, self._decay = make_codec(codec), decay
        self.may_overflow = self._codec.may_overflow and world.num_nodes > 1
        self._world = world
        self._algorithm = compressed(world, self._codec)
        self._slots: WeakSet[Slot] = WeakSet()
        if world.num_nodes == 1:
            world.print(f"mpitrain: compression {codec}: all ranks are on one node, so nothing is compressed")

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False, tensors: Tensors = ()) -> Slot:
        """See Exchange.

        Raises:
            ConfigError: `dtype` is not float32.
            DeviceError: a rank has no GPU, or too little memory on it; raised on every rank.
        """
        if dtype != numpy.float32:
            raise everywhere(
                ConfigError(
                    f"compression {self._codec.name} takes float32 gradients; the model has gradients of {dtype}. "
                    "Make its parameters float32, or leave compression out"
                )
            )
        algorithm = self._on_device if on_device else self._algorithm
        if isinstance(algorithm, ThroughHost):
            flat, on_host = algorithm.allocate(count, dtype)
            slot = Slot(flat, numpy.zeros(count, numpy.float32), on_host=on_host)
        elif isinstance(algorithm, DeviceSequential) and self._world.num_nodes > 1:
            flat, place = algorithm.allocate(count, dtype), algorithm.place
            with (
                allocating(self._world, place.gpu, flat.nbytes, "the residual of a codec"),
                working_on(place.gpu, place.stream),
            ):
                slot = Slot(flat, namespace(flat).zeros(count, numpy.float32), place)
        else:
            # Pages of parts that other ranks of the node keep are never written, so they take no memory.
            slot = Slot(algorithm.allocate(count, dtype), numpy.zeros(count, numpy.float32))
        self._slots.add(slot)
        return slot

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        """See Exchange."""
        check_slot(self._world, self._slots, slot)
        assert slot.residual is not None
        flat, left_out = slot.flat[part], slot.residual[part]
        scale(flat, share)
        slot.fade(part, self._decay)
        if not is_device_array(flat):
            return self._algorithm.start(flat, left_out, agreed=True)
        if isinstance(self._on_device, DeviceSequential):
            return self._on_device.start(flat, left_out, agreed=True)
        assert slot.on_host is not None
        host = slot.on_host[part]
        return self._on_device.start(flat, host, partial(self._algorithm.steps, host, left_out))

    def reset(self) -> None:
        """See Exchange: drop the error-feedback residuals."""
        for slot in self._slots:
            slot.clear()

    @cached_property
    def _on_device(self) -> DeviceSequential | ThroughHost:
        """The algorithm for device arrays, made with the first device slot: this is collective, and needs a GPU."""
        return coded(self._world, self._codec, self._algorithm)


def make_exchange(
    world: World, algorithm: str | None = None, compression: str | None = None, reduction: str | None = None
) -> Exchange:
    """Make the exchange for the arguments or, by default, for the world's settings. Collective.

    Raises:
        ConfigError: the algorithm, compression or reduction does not exist, or two of them exclude each other.
        MismatchError: the ranks ask for different exchanges.
    """
    compression = world.config.compression if compression is None else compression
    check_compression(compression, OTHERS)
    reduction = world.config.reduction if reduction is None else reduction
    check_reduction(reduction)
    world.agree("make an exchange", [f"compression {compression}", f"algorithm {algorithm}", f"reduction {reduction}"])
    if compression == "auto" and reduction == "exact":
        world.print("mpitrain: compression auto: none; reduction=exact sends gradients as they are")
        compression = "none"
    if compression == "auto":
        compression = _by_profile(world)
    if compression == "none":
        return PlainExchange(world, algorithm, reduction=reduction)
    check_plain(reduction, compression)
    if compression.partition(":")[0] == power_sgd.NAME:
        return LowRankExchange(world, compression, algorithm)
    if algorithm is not None:
        raise ConfigError(f"compression={compression} chooses its algorithm itself; leave out algorithm={algorithm}")
    return CompressedExchange(world, compression)


def _by_profile(world: World) -> str:
    """Choose a codec that has never cost loss if it pays off, and print the choice with its reason."""
    chosen = compression_by(world.profile, world.num_nodes, num_lanes(world))
    rate = world.profile.bytes_per_second / 1e6
    reason = f"{world.num_nodes} nodes, {rate:.0f} MB/s between them ({world.profile.origin})"
    if world.num_nodes > 1 and not world.profile.is_measured:
        reason = "the network is not known; measure it: mpitrain bench --save-profile FILE, then MPITRAIN_PROFILE=FILE"
    world.print(f"mpitrain: compression auto: {chosen}; {reason}")
    return chosen
