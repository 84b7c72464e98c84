"""The vote that ends a step: each rank reports on its gradients, and every rank raises an error if one objects."""

from __future__ import annotations

import math
from collections.abc import Collection

from mpitrain.errors import GradientError, MissingGradientError, NonFiniteError, everywhere
from mpitrain.reducer.bucket import Layout
from mpitrain.reducer.buckets import HostBuckets
from mpitrain.reducer.means import Told, mark_of
from mpitrain.waiting.agreement import Agreement
from mpitrain.watching.activity import num_orders
from mpitrain.world.world import World

GOOD, MISSING, NON_FINITE, NON_FINITE_LOSS = 0, 1, 2, 3  # what a rank reports


def begin_vote(
    world: World, missing: Collection[int], non_finite: int, loss: float, weight: float, told: Told, *, may_skip: bool
) -> Agreement:
    """Begin the vote with this rank's findings, without waiting. The records also carry the losses and the marks.

    In place of a weight, they carry the number of the newest command to the training that each rank has heard of.

    Args:
        missing: parameters whose gradients were not handed in.
        non_finite: the result of the buckets' `found`; -1 for nothing.
        loss: this rank's mean over `weight` samples.
        told: this rank's remarks.
        may_skip: with a loss scale that can be lowered, only the gradients decide, not the loss.
    """
    code, detail = GOOD, mark_of(told)
    if missing:
        code, detail = MISSING, min(missing)
    elif non_finite >= 0:
        code, detail = NON_FINITE, non_finite
    elif weight and not may_skip and not math.isfinite(loss):
        code = NON_FINITE_LOSS
    operation = "end of a step that may be skipped" if may_skip else "end of step"
    value, heard = weight * loss if weight else 0.0, float(num_orders())
    return world.begin_agreement(operation, value=value, weight=heard, code=code, detail=detail)


def objection(world: World, vote: Agreement, layout: Layout, place: HostBuckets) -> GradientError:
    """Return the error of the first rank that objects, for every rank to raise."""
    codes = vote.records["code"]
    rank = int(codes.nonzero()[0][0])
    detail = int(vote.records["detail"][rank])
    if codes[rank] == NON_FINITE:
        detail = place.parameter_of(detail)
    # The loss belongs to no parameter, and its rank's detail is a mark.
    name = "" if codes[rank] == NON_FINITE_LOSS else layout.parameters[detail].name
    return _problem(world.name(rank), int(codes[rank]), name)


def _problem(rank_name: str, code: int, parameter: str) -> GradientError:
    """Return the error that every rank raises about the rank of that name."""
    error: GradientError
    if code == MISSING:
        error = MissingGradientError(
            f"{rank_name} ended its backward pass without the gradient of {parameter}; pass zeros for a "
            "parameter that a batch does not use"
        )
    else:
        subject = "the loss is" if code == NON_FINITE_LOSS else f"the gradient of {parameter} holds"
        error = non_finite = NonFiniteError(
            f"{rank_name}: {subject} NaN or infinity; nothing was changed by this step. "
            "Try a smaller learning rate or gradient clipping, or examine that rank's data"
        )
        if code == NON_FINITE:
            non_finite.gradient_of = rank_name, parameter
    return everywhere(error)


def beyond_range(parameter: str) -> NonFiniteError:
    """Return the error that every rank raises if a codec has turned finite gradients into infinity."""
    return everywhere(
        NonFiniteError(
            f"the mean gradient of {parameter} is too large for the compression, though every rank's is "
            "finite; nothing was changed by this step. Use compression bf16 or int8, gradient clipping or a "
            "smaller learning rate"
        )
    )
