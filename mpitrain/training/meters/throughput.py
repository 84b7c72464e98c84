"""Measures the speed of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError
from mpitrain.training.meters.meter import Meter, Reading

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Throughput(Meter):
    """`samples_per_second` of all ranks together, `tokens_per_second` and `step_seconds`, over the steps of the row.

    The time includes the steps and their data, but not the hooks between them (evaluation, checkpoints). With a server
    it includes the hooks: workers that have a job compute meanwhile.
    """

    reads_model = False

    def __init__(self, *, tokens_per_sample: int | None = None) -> None:
        """`tokens_per_sample` is the length of each sample. Without it there is no `tokens_per_second`."""
        if tokens_per_sample is not None and tokens_per_sample < 1:
            raise ConfigError(f"Throughput: tokens_per_sample={tokens_per_sample}; it must be at least 1")
        self._tokens_per_sample = tokens_per_sample
        self._clear()

    def _clear(self) -> None:
        self._steps, self._samples, self._seconds = 0, 0.0, 0.0

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        self._steps += 1
        self._samples += step.samples
        self._seconds += step.seconds

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter."""
        if not self._steps:
            return {}
        rate = self._samples / self._seconds
        readings = {"samples_per_second": Reading(rate), "step_seconds": Reading(self._seconds / self._steps)}
        if self._tokens_per_sample:
            readings["tokens_per_second"] = Reading(rate * self._tokens_per_sample)
        self._clear()
        return readings
