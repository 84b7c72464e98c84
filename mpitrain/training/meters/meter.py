"""A meter: numbers of the steps since the last row of a record, and how those of the ranks become one."""

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
    """One rank's number.

    Attributes:
        value: of this rank.
        weight: of it in the mean over ranks, such as a number of samples; 0: it does not count, NaN included.
        over_ranks: "mean", weighted; "max"; or "root", rank 0's, for what is the same on all.
    """

    value: float
    weight: float = 1.0
    over_ranks: str = "mean"


class Meter:
    """Empty methods; a meter overrides those it needs. Every rank makes the same calls; none is collective."""

    def start(self, trainer: Trainer) -> str:
        """Once, before the first step. Returns why this rank has nothing to measure, or "" where it has."""
        return ""

    def before_row(self, trainer: Trainer) -> None:
        """Before the step that ends a row, for what is too dear to be measured in every step."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """After every step."""

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """By name, over the steps since the last call; a rank that has nothing leaves it out."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What belongs to a checkpoint that is taken between two rows; the same on every rank."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The reverse of `state`."""


def combine(of_ranks: Sequence[Mapping[str, Reading]]) -> dict[str, float]:
    """Each rank's readings, in rank order, as one number a name; a name that no rank has a value for is left out.

    A mean is that of the values by their weights, rounded once, whatever the order of the ranks.
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
            except (OverflowError, ValueError):  # fsum's words for sums of infinities
                total = sum(reading.value * reading.weight for reading in readings_of_name)
            combined[name] = total / math.fsum(reading.weight for reading in readings_of_name)
    return combined
