"""Step: what a step of a Trainer did, for hooks and meters."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.exchange.overlap import Overlap


@dataclass(frozen=True)
class Step:
    """What one step did; the same on every rank, but for `seconds`, `overlap` and what is its own.

    Attributes:
        number: steps made since the start of training, this one included.
        loss: mean over the samples of all ranks, before the update.
        samples: of all ranks together.
        learning_rate: that was used; 0 where the step was skipped.
        seconds: this rank's wall time for the step.
        overlap: what of it the exchange took on this rank, and how much of the exchange was hidden.
        loss_scale: that the gradients of this step were multiplied by; None without one.
        skipped: the loss scale made a gradient infinite, so parameters and optimizer stayed as they were.
        own_samples: of this rank.
        own_seconds: that this rank took for its batch and gradients, without what it waited for others; on a GPU
            only while `Trainer.times_own_work`.
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
