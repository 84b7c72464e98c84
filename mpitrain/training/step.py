"""Step tells hooks and meters what a step of a Trainer did."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpitrain.reducer.means import Overlap


@dataclass(frozen=True)
class Step:
    """What one step did. All values except `seconds`, `overlap`, `own_samples` and `own_seconds` agree on all ranks.

    Attributes:
        number: the number of steps since the start of training, including this one.
        loss: the mean loss over the samples of all ranks, before the update.
        samples: the number of samples of all ranks together.
        learning_rate: the learning rate that was used. 0 if the step was skipped.
        seconds: this rank's wall time for the step. On a server: since its last update, with the hooks between them.
        overlap: the time that the exchange took on this rank, and how much of the exchange was hidden.
        loss_scale: the factor by which the gradients of this step were multiplied. None without a loss scale.
        skipped: the loss scale made a gradient infinite, so parameters and optimizer did not change.
        own_samples: the number of samples of this rank.
        own_seconds: the time that this rank took for its batch and gradients, without waiting for others. On a GPU it
            is measured only while `Trainer.times_own_work` is true.
    """

    number: int
    loss: float
    samples: float
    learning_rate: float
    seconds: float
    overlap: Overlap
    loss_scale: float | None = None
    skipped: bool = False
    own_samples: int = 0
    own_seconds: float = 0.0


def unmade(number: int) -> Step:
    """Return a step with this number that an earlier attempt made. Only its number is known."""
    return Step(number, math.nan, 0.0, math.nan, 0.0, Overlap(0.0, 0.0, 0.0))
