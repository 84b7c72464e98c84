"""Means: what a step of a GradientReducer comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpitrain.errors import NonFiniteError
from mpitrain.exchange.overlap import Overlap
from mpitrain.exchange.remarks import Remarks


@dataclass(frozen=True)
class Means:
    """The result of a step; the same bits on every rank, but for `overlap`.

    Attributes:
        loss: the weighted mean of what the ranks gave to `finish`.
        weight: the sum of the ranks' weights: the global batch, in samples.
        overlap: this rank's times.
        cause: of a step that may be skipped: where some rank's gradients held NaN or infinity, what `finish` would
            have raised. The means then are no means.
        remarks: which parameters the ranks did not use, and the notes they gave to `finish`.
    """

    loss: float
    weight: float
    overlap: Overlap
    cause: NonFiniteError | None = None
    remarks: Remarks = field(default_factory=Remarks)

    @property
    def is_finite(self) -> bool:
        """False where some rank's gradients held NaN or infinity, and so do the means."""
        return self.cause is None
