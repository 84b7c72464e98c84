"""The checks of parameters and gradients, and the errors that every rank raises if a check fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy

from mpitrain.allreduce.algorithm import FLOATS
from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.errors import ConfigError, GradientError, MismatchError, everywhere
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.unexchanged import BUFFERS_IN_FINAL, NUMBER_IN_FINAL
from mpitrain.waiting.notes import as_text
from mpitrain.world.world import World

# The bits below are a checksum of what the steps have used.
COUNTED_FROM_BIT = 32
# The bits below are the number of a batch in its epoch.
EPOCH_FROM_BIT = 32


def check_plain(reduction: str, compression: str) -> None:
    """Raise ConfigError, on every rank, if sums must be exact, because compression rounds."""
    if reduction == "exact":
        raise everywhere(
            ConfigError(
                f"reduction=exact and compression={compression}: a codec rounds what each rank sends, so the sum would "
                "depend on the ranks again. Leave out one of the two"
            )
        )


def agree_on_layout(world: World, parameters: Sequence[Parameter], bucket_bytes: int, *, on_device: bool) -> list[str]:
    """Return lines that describe the exchanged gradients, and are equal on all ranks. Collective.

    Raises:
        MismatchError: the ranks differ; raised on every rank, names the first difference.
        ConfigError: there is no mean of such parameters; raised on every rank.
    """
    lines = [f"parameter {parameter}" for parameter in parameters]
    lines.append(f"buckets of {bucket_bytes} bytes")
    lines.append(f"gradients on {'GPUs' if on_device else 'the CPU'}")
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
    """Raise MismatchError unless all ranks are at the same batch; `turns` are by rank, as for GradientReducer.begin."""
    for rank, turn in enumerate(turns):
        if turn != turns[0]:
            raise everywhere(
                MismatchError(
                    f"{world.name(rank)} exchanges the gradients of {_batch(turn)}; {world.name(0)}: those of "
                    f"{_batch(turns[0])}; did a rank leave out a backward pass? Every rank needs one for every batch"
                )
            )


def _batch(turn: int) -> str:
    epoch, number = divmod(turn, 1 << EPOCH_FROM_BIT)
    return f"batch {number} of epoch {epoch + 1}" if epoch else f"batch {number}"


def check_steps(world: World, codes: Sequence[int]) -> None:
    """Raise MismatchError unless the optimizers of all ranks have made the same number of steps.

    The number is in the upper bits of the codes, which are by rank; see mpitrain/adapters/torch_steps.py. -1: unknown.
    """
    steps = [code >> COUNTED_FROM_BIT for code in codes]
    first = next((rank for rank, count in enumerate(steps) if count >= 0), 0)
    for rank, count in enumerate(steps):
        if count not in (steps[first], -1):
            raise everywhere(
                MismatchError(
                    f"{world.name(rank)} has made {count} steps of the optimizer, {world.name(first)} {steps[first]}; "
                    "did a rank skip a step by its own loss or gradient? All ranks make the same steps: decide by a "
                    "value that is equal on all ranks, such as world.mean(loss)"
                )
            )


def check_final(world: World, final: Mapping[int, Mapping[int, tuple[float, ...]]]) -> None:
    """Raise MismatchError unless all ranks have ended with equal steps and calls; see Notes.final. All ranks give the
    same.

    Args:
        final: by the ranks' numbers in the job, then by model or group. For a model (from 1): the number of steps, norm
            and sum of a sample of the last step's gradients, and its learning rates. For a process group (below 0): a
            text with its name, and in further lines the calls that were not compared (torch/waited_calls.py). Ranks of
            the job that are not in this world, such as servers, do not count.
    """
    members = world.control.members
    for number in sorted(
        {number for values in final.values() for number in values} - {NUMBER_IN_FINAL, BUFFERS_IN_FINAL}
    ):
        given = [rank for rank in final if rank in members and final[rank].get(number)]
        for rank in given[1:]:
            name, other = (world.name(members.index(one)) for one in (rank, given[0]))
            values, expected = (final[one][number] for one in (rank, given[0]))
            if values != expected:
                (_check_final_steps if number > 0 else _check_final_calls)(name, values, other, expected)


def _check_final_steps(name: str, values: tuple[float, ...], other: str, expected: tuple[float, ...]) -> None:
    count, *used = values[:3]
    size = 2**-6 * abs(expected[1]) if len(expected) > 1 else 0.0
    if count != expected[0]:
        problem = f"{name} has ended after {count:.0f} steps of the optimizer, {other} after {expected[0]:.0f}"
    elif values[3:] != expected[3:] or not numpy.allclose(used, expected[1:3], 2**-6, size, equal_nan=True):
        problem = f"{name} has made its last step of the optimizer with other gradients or rates than {other}"
    else:
        return
    raise everywhere(
        MismatchError(
            f"{problem}, so their parameters differ. All ranks make the same steps: decide by a value that is "
            "equal on all ranks, such as world.mean(loss)"
        )
    )


def _check_final_calls(name: str, values: tuple[float, ...], other: str, expected: tuple[float, ...]) -> None:
    (group, *calls), (_, *others) = (as_text(numbers).split("\n") for numbers in (values, expected))
    for here, there in zip_longest(calls, others, fillvalue="no more call"):
        if here != there:
            raise everywhere(
                MismatchError(
                    f"{name}: {here}; {other}: {there}, in {group}; what they got may be wrong. Do all ranks make the "
                    "same calls in the same order? The last calls of a group are compared at the end of the program"
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
