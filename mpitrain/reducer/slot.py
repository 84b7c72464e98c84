"""A slot: memory for gradients, together with their error-feedback residual."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import numpy

from mpitrain.arrays import Array, is_device_array
from mpitrain.collectives.shares import scale
from mpitrain.cuda.sequential import DevicePlace
from mpitrain.cuda.streams import working_on
from mpitrain.errors import DataError
from mpitrain.world.world import World

Tensors: TypeAlias = Sequence[tuple[str, tuple[int, ...]]]  # name and shape


@dataclass(frozen=True, eq=False)
class Slot:
    """The result of `Exchange.allocate`. Slots are compared by identity.

    Attributes:
        flat: flat array, on the CPU or on this rank's GPU: the gradients before a sum, their mean after it.
        residual: float32 array with as many elements, on the CPU or on this rank's GPU: what the codec has not sent of
            this rank's gradients so far. None: everything is sent.
        place: the GPU and the stream that work on a residual on the GPU.
        factors: the factors with which the next sum continues, by tensor: float32 CPU arrays, equal on all ranks; see
            mpitrain/compression/power_sgd.py. None: there are none.
        on_host: the CPU copy of `flat`, if gradients of a GPU are coded on the CPU; see mpitrain/cuda/staged.py.
    """

    flat: Array
    residual: Array | None = None
    place: DevicePlace | None = None
    factors: dict[Hashable, numpy.ndarray] | None = None
    on_host: numpy.ndarray | None = None

    def left_out(self) -> numpy.ndarray | None:
        """Return a copy of the residual as a CPU array, after all sums so far; None if there is no residual."""
        if self.residual is None:
            return None
        if self.place is None:
            copied: numpy.ndarray = self.residual.copy()
            return copied
        with working_on(self.place.gpu, self.place.stream):
            fetched: numpy.ndarray = self.residual.get()
            return fetched

    def restore(self, values: Array) -> None:
        """Overwrite the residual with `values`, a CPU or GPU array. No sum may be under way.

        Raises:
            DataError: the slot has no residual, or one of another shape or dtype. Nothing has changed.
        """
        expected = "none" if self.residual is None else f"{self.residual.dtype} {self.residual.shape}"
        if self.residual is None or f"{values.dtype} {values.shape}" != expected:
            raise DataError(
                f"the residual to restore is {values.dtype} {values.shape}, the residual of the slot is {expected}; "
                "restore what left_out() gave for a slot of the same count, with the same codec"
            )
        host = values.get() if is_device_array(values) else values
        if self.place is None:
            self.residual[:] = host
            return
        with self.place.gpu.current():
            self.residual.set(host, stream=self.place.stream)
            self.place.stream.synchronize()  # `host` must not change before this

    def fade(self, part: slice, factor: float) -> None:
        """Multiply a part of the residual, if there is one, by `factor`. No sum of that part may be under way."""
        if self.residual is None or factor == 1.0:
            return
        with nullcontext() if self.place is None else working_on(self.place.gpu, self.place.stream):
            scale(self.residual[part], factor)

    def clear(self) -> None:
        """Overwrite the residual, if there is one, with zeros."""
        if self.residual is None:
            return
        if self.place is None:
            self.residual.fill(0)
            return
        with working_on(self.place.gpu, self.place.stream):
            self.residual.fill(0)


def check_slot(world: World, made: Collection[Slot], slot: Slot) -> None:
    """Raise ValueError, on this rank only, unless `slot` is one of the slots that an exchange has made."""
    if isinstance(slot, Slot) and slot in made:
        return
    kind = "a slot of another exchange" if isinstance(slot, Slot) else f"an object of type {type(slot).__name__}"
    raise ValueError(
        f"{world.name()}: mean() was given {kind}; allowed are the slots that allocate() of this exchange has "
        "returned, because the slot keeps the codec's residual. Copy the values into slot.flat and pass the slot"
    )
