"""The last part of a step: the optimizer's update, or none where the means are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array
from mpitrain.exchange.means import Means
from mpitrain.training.loss_scale import LossScale


def applied(adapter: Adapter, flats: Mapping[numpy.dtype, Array], means: Means, scale: LossScale | None) -> float:
    """Update the parameters, and adapt the loss scale. Return the learning rate; 0.0: the step is skipped."""
    rate = adapter.apply_gradients(flats, means.remarks) if means.is_finite else 0.0
    if scale:
        scale.update(skipped=not means.is_finite)
    return rate
