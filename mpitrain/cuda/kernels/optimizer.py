"""One optimizer step in one pass over device memory, with the bits of mpitrain.training.optimizers on the host.

The kernels are in optimizer.cu, and the steps themselves in arithmetic.h.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mpitrain.arrays import Array, namespace
from mpitrain.cuda.kernels.bucket import SHORT
from mpitrain.cuda.kernels.launch import blocks_for, check, launch

_KINDS = {"float32": ("f32", "f4"), "float64": ("f64", "f8")}


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Additional work in the pass of an update.

    Attributes:
        unscale: the first factor of the gradients: 1 / loss scale.
        factor: float64[1] on the device, from clip_factor: the next factor, rounded to the gradients' dtype.
        skip: int32[1] on the device, from all_finite over all gradients: if it is not 0, nothing at all is done.
        non_finite: int32[1] on the device: set to 1 if a gradient is not finite after the multiplications; never
            cleared. Such a parameter and its state stay unchanged, and all others are updated. To leave out a whole
            step, call all_finite first, and pass `skip`.
        copy: bfloat16 or float16, as many elements as the float32 parameters: overwritten with the new parameters,
            rounded.
        decayed: int64 on the device, from decay_bounds: the parameters to which weight decay applies; None: all.
    """

    unscale: float = 1.0
    factor: Array | None = None
    skip: Array | None = None
    non_finite: Array | None = None
    copy: Array | None = None
    decayed: Array | None = None


def decay_bounds(ranges: Sequence[slice], like: Array) -> Array:
    """Return the begins and ends of the ranges, in order, as an int64 array where `like` is.

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
    stream: Any = None,
) -> None:
    """Make one step of mpitrain.training.optimizers.Sgd.

    Args:
        parameters: flat device array, float32 or float64; overwritten.
        gradients: as the parameters. Left as they are.
        velocity: as the parameters, where momentum is not 0, else None; overwritten.
        rate: the learning rate.
        fused: what else is done in the pass.
        stream: a CuPy stream in place of the current one.

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
    _update(f"sgd_{kind}", [_buffers(parameters, gradients, fused, number), velocity, settings], parameters, stream)


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
    stream: Any = None,
) -> None:
    """Make one step of mpitrain.training.optimizers.Adam, which ignores `fused.decayed`.

    Args:
        parameters: flat device array, float32 or float64; overwritten.
        gradients: as the parameters. Left as they are.
        first, second: the moments, as the parameters; overwritten.
        step: 1 at the first step.
        rate: the learning rate.
        fused: what else is done in the pass.
        stream: a CuPy stream in place of the current one.

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
        stream=stream,
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
    stream: Any = None,
) -> None:
    """Make one step of mpitrain.training.optimizers.AdamW. Arguments and errors are those of adam."""
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
    _update(
        f"adam_{kind}", [_buffers(parameters, gradients, fused, number), first, second, settings], parameters, stream
    )


def _nothing_decays(fused: Fused) -> bool:
    return fused.decayed is not None and fused.decayed.size == 0


def _checked(parameters: Array, gradients: Array, fused: Fused) -> tuple[str, str]:
    """Return the name of the kernel's kind, and NumPy's dtype of its numbers."""
    dtype = check("parameters", parameters, list(_KINDS))
    check("gradients", gradients, [dtype], parameters.size)
    if fused.factor is not None:
        check("factor", fused.factor, ["float64"], 1)
    for argument, flag in (("skip", fused.skip), ("non_finite", fused.non_finite)):
        if flag is not None:
            check(argument, flag, ["int32"], 1)
    if fused.decayed is not None:
        check("decayed", fused.decayed, ["int64"])
    if fused.copy is not None:
        if dtype != "float32":
            raise ValueError(f"copy is given, but the parameters are {dtype}; only float32 parameters have copies")
        check("copy", fused.copy, list(SHORT), parameters.size)
    return _KINDS[dtype]


def _buffers(parameters: Array, gradients: Array, fused: Fused, number: str) -> numpy.ndarray:
    """Return optimizer.cu's Buffers, with C's alignment."""
    pointers = {
        "parameters": parameters,
        "gradients": gradients,
        "factor": fused.factor,
        "skip": fused.skip,
        "non_finite": fused.non_finite,
        "copy": fused.copy,
    }
    layout = numpy.dtype(
        [
            *((name, "u8") for name in pointers),
            ("copy_is_fp16", "i4"),
            ("unscale", number),
            ("bounds", "u8"),
            ("num_bounds", "i4"),
        ],
        align=True,
    )
    table = numpy.zeros((), layout)
    for name, array in pointers.items():
        table[name] = 0 if array is None else array.data.ptr
    table["copy_is_fp16"] = fused.copy is not None and str(fused.copy.dtype) == "float16"
    table["unscale"] = fused.unscale
    if fused.decayed is not None and fused.decayed.size:
        table["bounds"], table["num_bounds"] = fused.decayed.data.ptr, fused.decayed.size
    return table


def _update(name: str, arguments: list[Any], parameters: Array, stream: Any) -> None:
    if parameters.size:
        blocks = blocks_for(parameters.nbytes // 16 + 1, parameters)
        launch("optimizer.cu", name, blocks, [*arguments, parameters.size], parameters, stream)
