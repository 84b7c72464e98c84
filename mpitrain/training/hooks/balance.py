"""Unequal machines: batches in proportion to measured speeds."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from mpitrain.errors import ConfigError, everywhere
from mpitrain.strategies.strategy import refuse_stages
from mpitrain.training.hooks.hook import Hook

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Balance(Hook):
    """Measure each rank's samples per second, and give each rank a part of the global batch in proportion.

    The samples of a step stay the same, and so does their mean, up to rounding. Only the division between the ranks
    changes. A speed belongs to a machine, not to the training. So no checkpoint holds it, and each run measures anew.
    The parts depend on the clock. Two runs therefore agree up to rounding, but not bit for bit.
    """

    def __init__(self, steps: int = 20, *, every: int | None = None) -> None:
        """
        Args:
            steps: the number of steps of the warm-up, in which speeds are measured. A rank's speed is the median.
            every: measure again this many steps after dividing the batches. Default: only when `measure` is called.

        Raises:
            ConfigError: a value is below 1.
        """
        if steps < 1:
            raise ConfigError(f"Balance over {steps} steps: the number must be at least 1")
        if every is not None and every < 1:
            raise ConfigError(f"Balance every {every} steps: the number must be at least 1")
        self._steps = steps
        self._every = every
        self._measured = 0  # steps of this measurement
        self._speeds: list[float] = []
        self._begin: int | None = 0  # the step after which to measure; None: not until `measure` is called
        self.samples_per_second: list[float] = []  # of each rank, as in the latest division

    def measure(self) -> None:
        """Measure again, from the next step on. Call this on every rank, between the same steps."""
        self._measured, self._speeds, self._begin = 0, [], 0

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return False

    def before_run(self, trainer: Trainer) -> None:
        """See Hook.

        Raises:
            ConfigError: the data cannot be divided into unequal parts, or the ranks of a pipeline need the same part.
                Raised on every rank.
        """
        refuse_stages(
            trainer.strategy,
            "Balance gives each rank a different part, but all stages of a pipeline need the same part. Leave the "
            "hook out, or use one stage",
        )
        if not hasattr(trainer.data, "share_out"):
            raise everywhere(
                ConfigError(
                    f"Balance: {type(trainer.data).__name__} has no method share_out(samples_per_second); "
                    "ArrayData, MapData, StreamData and Prefetch have it"
                )
            )
        self.measure()
        trainer.times_own_work = True

    def world_changed(self, trainer: Trainer) -> None:
        """See Hook. The new parts divide the data evenly."""
        self.before_run(trainer)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        if self._begin is None or step.number < self._begin:
            return
        if not trainer.times_own_work:  # the measurement begins with the next step
            trainer.times_own_work = True
            return
        if step.own_samples and step.own_seconds > 0:
            self._speeds.append(step.own_samples / step.own_seconds)
        self._measured += 1
        if self._measured < self._steps:
            return
        speed = statistics.median(self._speeds) if self._speeds else 0.0
        speeds = trainer.world.allgather(speed)
        if 0.0 in speeds:  # a rank had no samples in any of these steps: measure one more
            return
        data: Any = trainer.data  # before_run has checked that it has share_out
        data.share_out(speed)
        self.samples_per_second = speeds
        trainer.times_own_work = False
        self._begin = None if self._every is None else step.number + self._every
        self._measured, self._speeds = 0, []
        shares = ", ".join(f"{value / sum(speeds):.0%}" for value in speeds)
        trainer.world.print(f"step {step.number}: {sum(speeds):,.0f} samples/s, shared out by rank: {shares}")

    def after_run(self, trainer: Trainer) -> None:
        """See Hook."""
        trainer.times_own_work = False
