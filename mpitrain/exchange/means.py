"""Means: the result of a step of a GradientReducer."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpitrain.errors import NonFiniteError
from mpitrain.exchange.overlap import Overlap
from mpitrain.exchange.remarks import Remarks


@dataclass(frozen=True)
class Means:
    """The result of a step; the same bits on every rank, except for `overlap`.

    Attributes:
        loss: the weighted mean of the losses that the ranks gave to `finish`.
        weight: the sum of the ranks' weights, that is the global batch, in samples.
        overlap: this rank's times.
        cause: for a step that may be skipped: the error that `finish` would have raised if a rank's gradients hold NaN
            or infinity. The values are then not means.
        remarks: which parameters the ranks did not use, and the notes that they gave to `finish`.
        order_number: the number of the newest order for the training that any rank has heard of; 0: none has.
    """

    loss: float
    weight: float
    overlap: Overlap
    cause: NonFiniteError | None = None
    remarks: Remarks = field(default_factory=Remarks)
    order_number: int = 0

    @property
    def is_finite(self) -> bool:
        """False if a rank's gradients held NaN or infinity, as the means then do too."""
        return self.cause is None
