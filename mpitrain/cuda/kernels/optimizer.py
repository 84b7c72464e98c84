"""One optimizer step in one pass over GPU memory, with the same bits as mpitrain.optim.optimizers on the CPU.

The kernels are in optimizer.cu, and the steps themselves in arithmetic.h.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mpitrain.arrays import Array, namespace
from mpitrain.cuda.kernels.launch import blocks_for, check, launch

_KINDS = {"float32": ("f32", "f4"), "float64": ("f64", "f8")}


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Additional work in the pass of an update.

    Attributes:
        factor: float64[1] on the device, from clip_factor: the gradients' factor, rounded to their dtype.
        decayed: int64 on the device, from decay_bounds: the parameters to which weight decay applies; None: all.
    """

    factor: Array | None = None
    decayed: Array | None = None


def decay_bounds(ranges: Sequence[slice], like: Array) -> Array:
    """Return the begins and ends of the ranges, in order, as an int64 array on the device of `like`.

    Raises ValueError if they overlap or have a step.
    """
    bounds: list[int] = []
    for part in sorted(ranges, key=lambda part: (part.start, part.stop)):
        if part.step not in (None, 1) or not 0 <= part.start <= part.stop or (bounds and part.start < bounds[-1]):
            raise ValueError(f"decayed range {part} has a step, overlaps another one, or is not a valid range")
        if part.start < part.stop:
            bounds += [part.start, part.stop]
    bounds_on_host = numpy.array(bounds, numpy.int64)
    return namespace(like).asarray(bounds_on_host)


def sgd(
    parameters: Array,
    gradients: Array,
    velocity: Array | None = None,
    *,
    rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    fused: Fused | None = None,
) -> None:
    """Make one step of mpitrain.optim.optimizers.SGD.

    Args:
        parameters: flat device array, float32 or float64; overwritten.
        gradients: as the parameters. Left as they are.
        velocity: as the parameters, where momentum is not 0, else None; overwritten.
        rate: the learning rate.
        fused: what else is done in the pass.

    Raises:
        ValueError: the arrays are not such arrays.
        KernelError: the kernels do not compile.
    """
    fused = fused or Fused()
    kind, number = _checked(parameters, gradients, fused)
    if (velocity is None) != (momentum == 0):
        raise ValueError(
            f"momentum is {momentum} and velocity {'not ' if velocity is None else ''}given; one needs the other"
        )
    if velocity is not None:
        check("velocity", velocity, [str(parameters.dtype)], parameters.size)
    settings = numpy.zeros(
        (), numpy.dtype([(name, number) for name in ("rate", "momentum", "decay")] + [("nesterov", "?")], align=True)
    )
    decay = 0.0 if _nothing_decays(fused) else weight_decay
    settings["rate"], settings["momentum"], settings["decay"], settings["nesterov"] = rate, momentum, decay, nesterov
    _update(f"sgd_{kind}", [_buffers(parameters, gradients, fused), velocity, settings], parameters)


def adam(
    parameters: Array,
    gradients: Array,
    first: Array,
    second: Array,
    *,
    step: int,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    fused: Fused | None = None,
) -> None:
    """Make one step of mpitrain.optim.optimizers.Adam, which ignores `fused.decayed`.

    Args:
        parameters: flat device array, float32 or float64; overwritten.
        gradients: as the parameters. Left as they are.
        first, second: the moments, as the parameters; overwritten.
        step: 1 at the first step.
        rate: the learning rate.
        fused: what else is done in the pass.

    Raises as sgd does.
    """
    adamw(
        parameters,
        gradients,
        first,
        second,
        step=step,
        rate=rate,
        betas=betas,
        epsilon=epsilon,
        weight_decay=0.0,
        fused=fused,
    )


def adamw(
    parameters: Array,
    gradients: Array,
    first: Array,
    second: Array,
    *,
    step: int,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    fused: Fused | None = None,
) -> None:
    """Make one step of mpitrain.optim.optimizers.AdamW. Arguments and errors are those of adam."""
    fused = fused or Fused()
    kind, number = _checked(parameters, gradients, fused)
    for argument, state in (("first", first), ("second", second)):
        check(argument, state, [str(parameters.dtype)], parameters.size)
    if step < 1:
        raise ValueError(f"step is {step}; the first one is 1")
    beta1, beta2 = betas
    values = {
        "beta1": beta1,
        "rest1": 1 - beta1,
        "beta2": beta2,
        "rest2": 1 - beta2,
        "root_correction": 1 / math.sqrt(1 - beta2**step),
        "epsilon": epsilon,
        "rate": rate / (1 - beta1**step),
        "keep": 1.0 if _nothing_decays(fused) else 1 - rate * weight_decay,
    }
    settings = numpy.zeros((), [(name, number) for name in values])
    for name, value in values.items():
        settings[name] = value
    _update(f"adam_{kind}", [_buffers(parameters, gradients, fused), first, second, settings], parameters)


def _nothing_decays(fused: Fused) -> bool:
    return fused.decayed is not None and fused.decayed.size == 0


def _checked(parameters: Array, gradients: Array, fused: Fused) -> tuple[str, str]:
    """Return the name of the kernel's kind, and NumPy's dtype of its numbers."""
    dtype = check("parameters", parameters, list(_KINDS))
    check("gradients", gradients, [dtype], parameters.size)
    if fused.factor is not None:
        check("factor", fused.factor, ["float64"], 1)
    if fused.decayed is not None:
        check("decayed", fused.decayed, ["int64"])
    return _KINDS[dtype]


def _buffers(parameters: Array, gradients: Array, fused: Fused) -> numpy.ndarray:
    """Return optimizer.cu's Buffers, with C's alignment."""
    bounds = fused.decayed if fused.decayed is not None and fused.decayed.size else None
    pointers = {"parameters": parameters, "gradients": gradients, "factor": fused.factor, "bounds": bounds}
    table = numpy.zeros((), numpy.dtype([*((name, "u8") for name in pointers), ("num_bounds", "i4")], align=True))
    for name, array in pointers.items():
        table[name] = 0 if array is None else array.data.ptr
    table["num_bounds"] = 0 if bounds is None else bounds.size
    return table


def _update(name: str, arguments: list[Any], parameters: Array) -> None:
    if parameters.size:
        blocks = blocks_for(parameters.nbytes // 16 + 1, parameters)
        launch("optimizer.cu", name, blocks, [*arguments, parameters.size], parameters)
