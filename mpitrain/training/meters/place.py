"""The place where a model computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpitrain.arrays import is_device_array

if TYPE_CHECKING:
    from mpitrain.training.trainer import Trainer


def gpu_of(trainer: Trainer) -> Any:
    """Return CuPy's Device that the parameters are on; None if they are on the host."""
    return next((value.device for value in trainer.adapter.parameters().values() if is_device_array(value)), None)
