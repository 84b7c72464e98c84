"""What makes an update of a server: the answers to some jobs, their weights, and their means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from mpitrain.errors import NonFiniteError
from mpitrain.exchange.means import Means
from mpitrain.exchange.overlap import Overlap
from mpitrain.exchange.remarks import remarks_of
from mpitrain.serve.answers import Answer
from mpitrain.serve.jobs import ServedJob
from mpitrain.serve.pushes import Push, mean_of, shares_of


class ServedUpdate:
    """An update that is to be made.

    Attributes:
        jobs, answers: in the order in which gradients are added up.
        shares: the weights of the gradients, without the loss scales.
        means: of the update; not finite if it is to be skipped.
    """

    def __init__(
        self, jobs: Sequence[ServedJob], answers: Sequence[Answer], pushes: Sequence[Push], *, may_skip: bool
    ) -> None:
        """
        Args:
            pushes: of the answers.
            may_skip: there is a loss scale, which may have made gradients infinite.
        """
        self.jobs, self.answers, self._pushes = jobs, answers, pushes
        self.shares = shares_of(jobs, pushes)
        total = sum(job.samples for job in jobs)
        loss = sum(job.samples * push.loss for job, push in zip(jobs, pushes, strict=True)) / total
        is_finite = not (may_skip and any(answer.first_not_finite for answer in answers))
        cause = None if is_finite else NonFiniteError("the loss scale made a gradient infinite")
        self.means = Means(loss, total, Overlap(0.0, 0.0, 0.0), cause, remarks_of([push.told for push in pushes]))

    def staleness(self, version: int) -> list[int]:
        """Return that of each gradient, where the parameters have this version."""
        return [version - push.version for push in self._pushes]

    def gradients(self) -> dict[numpy.dtype, numpy.ndarray]:
        """Return the means of the gradients of this server's part, by dtype."""
        return mean_of([push.flats for push in self._pushes], self.shares)
