"""The exchange of gradients as products of thin matrices: PowerSGD, by mpitrain/compression/power_sgd.py."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from weakref import WeakKeyDictionary

import numpy

from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.allreduce.device import make_transport
from mpitrain.allreduce.device.low_rank import OnDevice, low_rank_place
from mpitrain.allreduce.device.sequential import DeviceSequential, OnStream
from mpitrain.allreduce.low_rank import low_rank_steps
from mpitrain.arrays import is_device_array
from mpitrain.compression.kernels import can_compile
from mpitrain.compression.power_sgd import Plan, Products, plan, rank_of
from mpitrain.cuda.device import cupy_module
from mpitrain.cuda.memory import allocating
from mpitrain.cuda.streams import working_on
from mpitrain.errors import ConfigError, everywhere
from mpitrain.exchange.checks import check_plain
from mpitrain.exchange.shares import scale
from mpitrain.exchange.slot import Slot, Tensors, check_slot
from mpitrain.world import World


class LowRankExchange:
    """Sends float32 matrices as products of thin ones, with error feedback, and everything else as it is.

    Each rank keeps what is left out of its own gradients, and all keep the same factors, for the next step. What a rank
    keeps takes the memory of its gradients once more. On one node nothing is compressed, and a line says so.

    Gradients on a GPU stay there, and so does what is left out of them; see mpitrain/allreduce/device/low_rank.py.
    """

    division = "tensors of each rank"

    def __init__(self, world: World, compression: str, algorithm: str | None = None) -> None:
        """Collective.

        Args:
            compression: `power_sgd`, or with a rank as in `power_sgd:2`.
            algorithm: of the two sums, a name in ALGORITHMS; default: the world's setting.

        Raises:
            ConfigError: the world's settings ask for exact sums. On every rank.
        """
        check_plain(world.config.reduction, compression)
        self._rank, self._name = rank_of(compression), compression
        self._world = world
        self._algorithm = make_algorithm(world, algorithm)
        self._is_plain = world.num_nodes == 1
        self.may_overflow = not self._is_plain  # M Q may, of finite numbers near the end of float32
        self._slots: WeakKeyDictionary[Slot, Tensors] = WeakKeyDictionary()
        self._sites: WeakKeyDictionary[Slot, OnDevice] = WeakKeyDictionary()
        if self._is_plain:
            world.print(f"mpitrain: compression {compression}: all ranks are on one node, so nothing is compressed")
            return
        products = Products(can_compile())
        products.warm_up()
        self._steps = low_rank_steps(world, self._algorithm.steps, products)
        self._plan = lru_cache(maxsize=None)(self._made_plan)

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False, tensors: Tensors = ()) -> Slot:
        """See Exchange. Without `tensors`, all of it is sent as it is.

        Raises:
            ConfigError: `dtype` is not float32.
            DeviceError: a rank has no GPU, or too little memory on it, or the transport that is asked for cannot carry
                the sums; raised on every rank.
        """
        if dtype != numpy.float32:
            raise everywhere(
                ConfigError(
                    f"compression {self._name} takes float32 gradients; the model has gradients of {dtype}. Make its "
                    "parameters float32, or leave compression out"
                )
            )
        tensors = tuple(tensors) or (("", (count,)),)
        if on_device and not self._is_plain:
            slot = self._on_device(count, tensors)
        else:
            flat = (self._transport if on_device else self._algorithm).allocate(count, dtype)
            slot = Slot(flat, None if self._is_plain else numpy.zeros(count, numpy.float32), factors={})
        self._slots[slot] = tensors
        return slot

    def _on_device(self, count: int, tensors: Tensors) -> Slot:
        """Make a slot whose gradients are compressed on a GPU. Collective."""
        place = self._stream.place
        self._world.queue.finish()
        with allocating(self._world, place.gpu, 8 * count, "a bucket and what is left out of it"):
            flat = cupy_module().empty(count, numpy.float32)
            with working_on(place.gpu, place.stream):
                slot = Slot(flat, cupy_module().zeros(count, numpy.float32), place, {})
        self._sites[slot] = OnDevice(self._world, place, self._plan(tensors, 0, count))
        return slot

    @cached_property
    def _stream(self) -> OnStream:
        """What carries the work of device slots, made with the first one: this is collective, and needs a GPU."""
        return OnStream(self._world, low_rank_place(self._world, self._name), self._name)

    @cached_property
    def _transport(self) -> DeviceSequential:
        """The same where nothing is compressed."""
        return make_transport(self._world)

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        """See Exchange. A tensor that lies in the part only in part is sent as it is."""
        check_slot(self._world, self._slots, slot)
        flat = slot.flat[part]
        scale(flat, share)
        if self._is_plain:
            return (self._transport if is_device_array(flat) else self._algorithm).start(flat, agreed=True)
        assert slot.residual is not None
        assert slot.factors is not None
        begin, end, _ = part.indices(slot.flat.size)
        residual, site = slot.residual[part], self._sites.get(slot)
        steps = self._steps(flat, residual, self._plan(self._slots[slot], begin, end), slot.factors, site)
        if site is None:
            return AllreduceHandle(self._world, self._name, flat, steps)
        return self._stream.start(flat, steps, (flat, residual, site), agreed=True)

    def _made_plan(self, tensors: Tensors, begin: int, end: int) -> Plan:
        """The plan of this part of a slot."""
        inside: list[tuple[str, tuple[int, ...]]] = []
        at = 0
        for name, shape in tensors:
            first, at = at, at + math.prod(shape)
            if begin <= first and at <= end:
                inside.append((name, shape))
            elif (common := min(at, end) - max(first, begin)) > 0:
                inside.append((name, (common,)))
        return plan(inside, self._rank)

    def reset(self) -> None:
        """See Exchange: forget what is left out, and the factors."""
        for slot in self._slots:
            slot.clear()
            if slot.factors is not None:
                slot.factors.clear()
