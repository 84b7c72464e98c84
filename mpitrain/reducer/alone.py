"""An Exchange that exchanges nothing: each rank keeps the mean over its own samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy

from mpitrain.allreduce.algorithm import AllreduceHandle, Sequential
from mpitrain.arrays import Array, is_device_array
from mpitrain.collectives.shares import scale
from mpitrain.cuda.sequential import DevicePlace, DeviceSequential
from mpitrain.reducer.slot import Slot, Tensors
from mpitrain.world.world import World

_NAME = "alone"


class AloneExchange:
    """See Exchange. With it, a GradientReducer checks and votes as usual, and its "means" are this rank's gradients.

    Attributes:
        loss_scale: the factor by which the gradients of the current step are multiplied. Set it before each step.
    """

    may_overflow = False
    division = ""

    def __init__(self, world: World) -> None:
        self.loss_scale = 1.0
        self._world = world
        self._on_host = Sequential(world, _NAME, _nothing)

    @cached_property
    def _on_device(self) -> DeviceSequential:
        """Made with the first device slot: this is collective, and needs a GPU."""
        return DeviceSequential(self._world, DevicePlace(self._world), _NAME, _nothing)

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False, tensors: Tensors = ()) -> Slot:
        """See Exchange.

        Raises:
            DeviceError: a rank has no GPU, or too little memory on it; raised on every rank.
        """
        return Slot((self._on_device if on_device else self._on_host).allocate(count, dtype))

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        """See Exchange. Nothing is summed. A rank without samples keeps zeros."""
        flat = slot.flat[part]
        scale(flat, 1 / self.loss_scale if share else 0.0)
        return (self._on_device if is_device_array(flat) else self._on_host).start(flat, agreed=True)

    def reset(self) -> None:
        """See Exchange. Nothing is kept here."""


def _nothing(_: Array, __: Array | None = None, /) -> Iterator[float | None]:
    return iter(())
