"""The factor by which a loss is multiplied so that its gradients do not vanish in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpitrain.errors import CheckpointError, ConfigError

# One float32 factor combines the scale and a rank's share of the samples. Its range is large enough for both.
_LARGEST = 2.0**32


class LossScale:
    """A scale that is halved after every skipped step, and doubled after many good steps.

    fp16 has no numbers between 0 and 6e-8, but many gradients are that small. Multiplied by the scale at the beginning
    of the backward pass, these gradients fit into fp16. Divided by the scale in float32, they have their values again,
    exactly, because the scale is a power of two. If a gradient becomes too large for fp16, all ranks skip the step:
    parameters and optimizer do not change. At a scale of 1 no step is skipped: there NaN or infinity has another cause,
    and is an error.

    Every rank makes the same calls, so the scale is the same on all ranks. Source: Micikevicius et al., Mixed Precision
    Training (2018), section 3.2, with the dynamic scale of NVIDIA's Apex and of PyTorch's GradScaler (doubled after
    2000 good steps).
    """

    def __init__(self, initial: float = 65536.0, *, growth_interval: int = 2000) -> None:
        """
        Args:
            initial: the scale of the first step, a power of two from 1 to 2^32.
            growth_interval: double the scale after this many good steps, up to 2^32.

        Raises:
            ConfigError: a value is not allowed.
        """
        if not _is_scale(initial):
            raise ConfigError(f"LossScale({initial!r}): it must be a power of two from 1 to 2**32")
        if not isinstance(growth_interval, int) or growth_interval < 1:
            raise ConfigError(f"LossScale: growth_interval={growth_interval!r}; it must be an int of at least 1")
        self._value = float(initial)
        self._growth_interval = growth_interval
        self._good_steps = 0
        self._skipped_steps = 0

    @property
    def value(self) -> float:
        """The factor by which the loss of this step is multiplied."""
        return self._value

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped since the start of training."""
        return self._skipped_steps

    @property
    def may_skip(self) -> bool:
        """True if a step may be skipped. False at a scale of 1, which cannot be lowered."""
        return self._value > 1

    def update(self, *, skipped: bool) -> None:
        """End a step. Halve the scale if the step was skipped; otherwise count the step as good."""
        if skipped:
            self._value, self._good_steps = self._value / 2, 0
            self._skipped_steps += 1
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self._value, self._good_steps = min(self._value * 2, _LARGEST), 0

    def state(self) -> dict[str, float | int]:
        """Return the state for a checkpoint: numbers by name."""
        return {"value": self._value, "good_steps": self._good_steps, "skipped_steps": self._skipped_steps}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless `state` can be a result of `state()`."""
        value, *counts = (state.get(name) for name in ("value", "good_steps", "skipped_steps"))
        if not (_is_scale(value) and all(isinstance(count, int) and count >= 0 for count in counts)):
            raise CheckpointError(f"the loss scale's state is {dict(state)}; was it written by mpitrain?")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raise CheckpointError, with nothing changed, if it is not a state."""
        self.check(state)
        self._value = float(state["value"])
        # If the interval is shorter now, it may already have passed.
        self._good_steps = min(state["good_steps"], self._growth_interval - 1)
        self._skipped_steps = state["skipped_steps"]


def _is_scale(value: object) -> bool:
    return isinstance(value, int | float) and 1 <= value <= _LARGEST and math.frexp(value)[0] == 0.5
