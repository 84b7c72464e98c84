"""The exchange of gradients as products of thin matrices: PowerSGD, by mpitrain/compression/power_sgd.py."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache, partial
from weakref import WeakKeyDictionary

import numpy

from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.allreduce.low_rank import low_rank_steps
from mpitrain.arrays import is_device_array
from mpitrain.collectives.shares import scale
from mpitrain.compression.kernels import can_compile
from mpitrain.compression.power_sgd import Plan, Products, plan, rank_of
from mpitrain.cuda.sequential import DeviceSequential
from mpitrain.cuda.staged import ThroughHost
from mpitrain.cuda.transports import make_transport
from mpitrain.errors import ConfigError, everywhere
from mpitrain.reducer.checks import check_plain
from mpitrain.reducer.slot import Slot, Tensors, check_slot
from mpitrain.world.world import World


class LowRankExchange:
    """Sends float32 matrices as products of thin ones, with error feedback, and everything else unchanged.

    For the next step, each rank keeps the residual of its own gradients, and all keep the same factors. The residual
    takes as much memory as the gradients. On one node nothing is compressed, and a message reports this.

    Gradients on a GPU are copied to the CPU, bucket by bucket, with a message; their residuals stay on the CPU.
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
        self.may_overflow = not self._is_plain  # M Q may overflow for finite numbers near the limit of float32
        self._slots: WeakKeyDictionary[Slot, Tensors] = WeakKeyDictionary()
        if self._is_plain:
            world.print(f"mpitrain: compression {compression}: all ranks are on one node, so nothing is compressed")
            return
        products = Products(can_compile())
        products.warm_up()
        self._steps = low_rank_steps(world, self._algorithm.steps, products)
        self._plan = lru_cache(maxsize=None)(self._made_plan)

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False, tensors: Tensors = ()) -> Slot:
        """See Exchange. Without `tensors`, everything is sent unchanged.

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
        residual = None if self._is_plain else numpy.zeros(count, numpy.float32)
        if on_device and not self._is_plain:
            flat, on_host = self._through_host.allocate(count, dtype)
            slot = Slot(flat, residual, factors={}, on_host=on_host)
        else:
            slot = Slot(
                (self._transport if on_device else self._algorithm).allocate(count, dtype), residual, factors={}
            )
        self._slots[slot] = tuple(tensors) or (("", (count,)),)
        return slot

    @cached_property
    def _through_host(self) -> ThroughHost:
        """The path for GPU slots, made with the first one: this is collective, and needs a GPU."""
        through = ThroughHost(self._world, self._name, self._algorithm)
        name = self._name
        self._world.print(f"mpitrain: compression {name} has no kernels for GPUs: gradients are coded on the CPU")
        return through

    @cached_property
    def _transport(self) -> DeviceSequential:
        """The same if nothing is compressed."""
        return make_transport(self._world)

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        """See Exchange. A tensor that is only partly in `part` is sent unchanged."""
        check_slot(self._world, self._slots, slot)
        flat = slot.flat[part]
        scale(flat, share)
        if self._is_plain:
            return (self._transport if is_device_array(flat) else self._algorithm).start(flat, agreed=True)
        assert slot.residual is not None
        assert slot.factors is not None
        begin, end, _ = part.indices(slot.flat.size)
        residual, factors, plan = slot.residual[part], slot.factors, self._plan(self._slots[slot], begin, end)
        if slot.on_host is None:
            return AllreduceHandle(self._world, self._name, flat, self._steps(flat, residual, plan, factors))
        host = slot.on_host[part]
        return self._through_host.start(flat, host, partial(self._steps, host, residual, plan, factors))

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
        """See Exchange: clear the residuals and the factors."""
        for slot in self._slots:
            slot.clear()
            if slot.factors is not None:
                slot.factors.clear()
