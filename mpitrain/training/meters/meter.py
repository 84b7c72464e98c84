"""A meter measures numbers of the steps since the last row of a record. `combine` makes one number of all ranks'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


@dataclass(frozen=True)
class Reading:
    """The number of one rank.

    Attributes:
        value: the number of this rank.
        weight: its weight in the mean over ranks, such as a number of samples. With weight 0 the value is ignored, also
            NaN.
        over_ranks: "mean" for the weighted mean, "max" for the maximum, "root" for rank 0's value (if all are equal).
    """

    value: float
    weight: float = 1.0
    over_ranks: str = "mean"


class Meter:
    """The base class of meters. Its methods are empty; a meter overrides those that it needs.

    Every rank makes the same calls. No method is collective.

    Attributes:
        reads_model: this meter may read parameters or the optimizer's state; see Hook.reads_model.
    """

    reads_model = True

    def start(self, trainer: Trainer) -> str:
        """Is called once, before the first step. Return why this rank has nothing to measure, or "" if it has."""
        return ""

    def before_row(self, trainer: Trainer) -> None:
        """Is called before the step that ends a row, for numbers that are too expensive to measure in every step."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Is called after every step."""

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """Return readings by name, over the steps since the last call. Leave out a name without a reading."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what belongs to a checkpoint between two rows. The state is the same on every rank."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state`."""


def combine(of_ranks: Sequence[Mapping[str, Reading]]) -> dict[str, float]:
    """Combine the readings of all ranks, given in rank order, into one number for each name.

    A name for which no rank has a value is left out. A mean is weighted and rounded once, whatever the order of ranks.
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for readings in of_ranks for name in readings):
        readings_of_name = [
            reading for readings in of_ranks if (reading := readings.get(name)) is not None and reading.weight > 0
        ]
        if not readings_of_name:
            continue
        if readings_of_name[0].over_ranks == "max":
            combined[name] = max(reading.value for reading in readings_of_name)
        elif readings_of_name[0].over_ranks == "root" or len(readings_of_name) == 1:
            combined[name] = readings_of_name[0].value
        else:
            try:
                total = math.fsum(reading.value * reading.weight for reading in readings_of_name)
            except (OverflowError, ValueError):  # fsum raises these for sums of infinities
                total = sum(reading.value * reading.weight for reading in readings_of_name)
            combined[name] = total / math.fsum(reading.weight for reading in readings_of_name)
    return combined
