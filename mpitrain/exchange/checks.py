"""The checks of parameters and gradients, and the errors that every rank raises if a check fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy

from mpitrain.allreduce.algorithm import FLOATS
from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.errors import ConfigError, GradientError, MismatchError, everywhere
from mpitrain.exchange.bucket import Parameter
from mpitrain.world import World


def check_plain(reduction: str, compression: str) -> None:
    """Raise ConfigError, for all ranks, if sums are to be exact: a compression rounds."""
    if reduction == "exact":
        raise everywhere(
            ConfigError(
                f"reduction=exact and compression={compression}: a codec rounds what each rank sends, so the sum would "
                "depend on the ranks again. Leave out one of the two"
            )
        )


def agree_on_layout(world: World, parameters: Sequence[Parameter], bucket_bytes: int, *, on_device: bool) -> list[str]:
    """Return, in lines, what all ranks must have in common in the gradients that they exchange. Collective.

    Raises:
        MismatchError: the ranks differ; raised on every rank, names the first difference.
        ConfigError: there is no mean of such parameters; raised on every rank.
    """
    lines = [f"parameter {parameter}" for parameter in parameters]
    lines.append(f"buckets of {bucket_bytes} bytes")
    lines.append(f"gradients on {'GPUs' if on_device else 'the host'}")
    world.agree("compare the gradients' layout", lines)
    _check_parameters(parameters)
    return lines


def _check_parameters(parameters: Sequence[Parameter]) -> None:
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
        raise everywhere(ConfigError(problem))


def check_gradient(rank_name: str, parameter: Parameter, gradient: Array) -> None:
    """Raise GradientError, on the rank of that name only, unless the gradient has its parameter's shape and dtype."""
    shape, dtype = getattr(gradient, "shape", None), getattr(gradient, "dtype", None)
    if shape != parameter.shape or dtype != parameter.dtype:
        kind = type(gradient).__name__ if shape is None or dtype is None else f"{dtype} {shape}"
        raise GradientError(
            f"{rank_name}: the gradient of {parameter.name} is {kind}; "
            f"the parameter is {parameter.dtype} {parameter.shape}"
        )


def check_scales(world: World, scales: list[float]) -> None:
    """Raise MismatchError unless the ranks' loss scales, given by rank, are equal."""
    for rank, scale in enumerate(scales):
        if scale != scales[0]:
            raise everywhere(
                MismatchError(
                    f"{world.name(rank)}: the loss scale is {scale}; {world.name(0)}: the loss scale is {scales[0]}; "
                    "did all ranks restore the same checkpoint?"
                )
            )


def check_turns(world: World, turns: list[int]) -> None:
    """Raise MismatchError unless all ranks are at the same batch, given by rank."""
    for rank, turn in enumerate(turns):
        if turn != turns[0]:
            raise everywhere(
                MismatchError(
                    f"{world.name(rank)} exchanges the gradients of batch {turn}; {world.name(0)}: those of batch "
                    f"{turns[0]}; did a rank leave out a backward pass? Every rank needs one for every batch"
                )
            )


def check_steps(world: World, steps: list[int]) -> None:
    """Raise MismatchError unless the optimizers of all ranks have made the same number of steps, given by rank."""
    for rank, count in enumerate(steps):
        if count != steps[0]:
            raise everywhere(
                MismatchError(
                    f"{world.name(rank)} has made {count} steps of the optimizer, {world.name(0)} {steps[0]}; did a "
                    "rank skip a step by its own loss or gradient? All ranks make the same steps: decide by a value "
                    "that is equal on all ranks, such as world.mean(loss)"
                )
            )


def all_finite(flat: Array) -> bool:
    """True if an array holds neither NaN nor infinity."""
    if not is_device_array(flat) and flat.dtype.char in "fd":
        # One pass of BLAS instead of two of NumPy. The sum may overflow, so only a finite sum counts.
        with numpy.errstate(over="ignore", invalid="ignore"):
            if numpy.isfinite(numpy.dot(flat, flat)):
                return True
    return bool(namespace(flat).isfinite(flat).all())
