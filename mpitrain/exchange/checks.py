"""What is checked of parameters and gradients, and what every rank raises where it does not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy

from mpitrain.allreduce.algorithm import FLOATS
from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.errors import ConfigError, GradientError, MismatchError, MissingGradientError, NonFiniteError
from mpitrain.exchange.bucket import Parameter
from mpitrain.world import World

# What a rank says of its gradients at the end of a step.
GOOD, MISSING, NON_FINITE, NON_FINITE_LOSS = 0, 1, 2, 3


def check_parameters(parameters: Sequence[Parameter]) -> None:
    """Raise ConfigError where there is no mean of such parameters. All ranks have compared them: all raise or none."""
    problem = "" if parameters else "the model has no parameters"
    names = Counter(parameter.name for parameter in parameters)
    for parameter in parameters:
        if names[parameter.name] > 1:
            problem = f"two parameters are called {parameter.name}; names must be unique"
        elif parameter.dtype not in FLOATS:
            problem = (
                f"parameter {parameter.name} is {parameter.dtype}; gradients are averaged in "
                f"{', '.join(str(dtype) for dtype in FLOATS)}"
            )
    if problem:
        error = ConfigError(problem)
        error.known_everywhere = True
        raise error


def check_gradient(who: str, parameter: Parameter, gradient: Array) -> None:
    """Raise GradientError, on the rank `who` alone, unless it has its parameter's shape and dtype."""
    shape, dtype = getattr(gradient, "shape", None), getattr(gradient, "dtype", None)
    if shape != parameter.shape or dtype != parameter.dtype:
        found = type(gradient).__name__ if shape is None or dtype is None else f"{dtype} {shape}"
        raise GradientError(
            f"{who}: the gradient of {parameter.name} is {found}; the parameter is {parameter.dtype} {parameter.shape}"
        )


def check_scales(world: World, scales: list[float]) -> None:
    """Raise MismatchError unless the ranks' loss scales, here by rank, are equal."""
    for rank, scale in enumerate(scales):
        if scale != scales[0]:
            error = MismatchError(
                f"{world.name(rank)}: the loss scale is {scale}; {world.name(0)}: it is {scales[0]}; "
                "did all ranks restore the same checkpoint?"
            )
            error.known_everywhere = True
            raise error


def check_turns(world: World, turns: list[int]) -> None:
    """Raise MismatchError unless all ranks are at the same batch, here by rank."""
    for rank, turn in enumerate(turns):
        if turn != turns[0]:
            error = MismatchError(
                f"{world.name(rank)} exchanges the gradients of batch {turn}; {world.name(0)}: those of batch "
                f"{turns[0]}; did a rank leave out a backward pass? Every rank needs one for every batch"
            )
            error.known_everywhere = True
            raise error


def problem(who: str, code: int, parameter: str) -> GradientError:
    """What every rank raises about the rank `who`."""
    error: GradientError
    if code == MISSING:
        error = MissingGradientError(
            f"{who} ended its backward pass without the gradient of {parameter}; "
            "hand in zeros for a parameter that a batch does not use"
        )
    else:
        what = "the loss is" if code == NON_FINITE_LOSS else f"the gradient of {parameter} holds"
        error = NonFiniteError(
            f"{who}: {what} NaN or infinity; nothing was changed by this step. "
            "Try a smaller learning rate, gradient clipping, or look at that rank's data"
        )
    error.known_everywhere = True
    return error


def beyond_range(parameter: str) -> NonFiniteError:
    """What every rank raises where a codec has made infinity of finite gradients."""
    error = NonFiniteError(
        f"the mean gradient of {parameter} is beyond what the compression can express, though every rank's is finite; "
        "nothing was changed by this step. Use compression bf16 or int8, gradient clipping or a smaller learning rate"
    )
    error.known_everywhere = True
    return error


def all_finite(flat: Array) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    if not is_device_array(flat) and flat.dtype.char in "fd":
        # One pass of BLAS instead of two of NumPy. The sum may overflow, so only a finite one is trusted.
        with numpy.errstate(over="ignore", invalid="ignore"):
            if numpy.isfinite(numpy.dot(flat, flat)):
                return True
    return bool(namespace(flat).isfinite(flat).all())
