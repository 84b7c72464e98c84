"""Learning rates as functions of the step, which counts from 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from mpitrain.errors import ConfigError

Schedule: TypeAlias = Callable[[int], float]


def constant(rate: float) -> Schedule:
    """Return a schedule with the same `rate` at every step: a function from the step, counted from 0, to the rate.

    Raises ConfigError if `rate` is not a finite number >= 0.
    """
    if not (math.isfinite(rate) and rate >= 0):
        raise ConfigError(f"rate is {rate!r}; allowed: a finite number >= 0")
    return lambda _step: rate


def warmup_cosine(peak: float, *, warmup_steps: int, total_steps: int, final: float = 0.0) -> Schedule:
    """Return a schedule that rises linearly to `peak`, then falls along half a cosine to `final`.

    A schedule is a function from the step, counted from 0, to the learning rate.
    Step 0 has the rate peak / (warmup_steps + 1), so no step is wasted on a rate of zero. Step `warmup_steps` has
    exactly `peak`. Step `total_steps` and every later step have exactly `final`. A run of `total_steps` steps ends at
    step total_steps - 1, one step before `final`.

    Raises ConfigError unless 0 <= final <= peak, both finite, and 0 <= warmup_steps < total_steps.
    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts (2017), equation 5,
    without restarts; the warm-up is Goyal et al., Accurate, Large Minibatch SGD (2017), section 2.2.
    """
    if not (math.isfinite(peak) and 0 <= final <= peak):
        raise ConfigError(f"peak is {peak!r} and final {final!r}; allowed: 0 <= final <= peak, both finite")
    if not 0 <= warmup_steps < total_steps:
        raise ConfigError(
            f"warmup_steps is {warmup_steps!r} and total_steps {total_steps!r}; "
            "allowed: 0 <= warmup_steps < total_steps"
        )

    def rate(step: int) -> float:
        if step <= warmup_steps:
            return peak * ((step + 1) / (warmup_steps + 1))
        if step >= total_steps:
            return final
        progress = (step - warmup_steps) / (total_steps - warmup_steps)
        return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return rate
