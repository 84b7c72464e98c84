"""The global norm, and the factor for gradients that limits it. The kernels are in norm.cu."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from mpitrain.arrays import Array, namespace
from mpitrain.cuda.kernels.bucket import FLOATS
from mpitrain.cuda.kernels.launch import check, launch

BLOCKS = 256  # per launch on any device, so that the order of the sum is the same; norm.cu has the same number


def squared_norm(flat: Array, out: Array, *, stream: Any = None) -> None:
    """out[0] = the sum of the squares of `flat`, computed in float64.

    Equal values give equal bits, on any device and at any address. The sum is infinite or NaN if a value is, and
    infinite if it exceeds the range of float64.

    Args:
        flat: flat device array, floating.
        out: float64[1] on the device; overwritten.
        stream: a CuPy stream in place of the current one.

    Raises:
        ValueError: an array is different.
        KernelError: the kernels do not compile.
    """
    dtype = check("flat", flat, list(FLOATS))
    check("out", out, ["float64"], 1)
    cupy = namespace(flat)
    with nullcontext() if stream is None else stream:
        partial = cupy.empty(BLOCKS, cupy.float64)
        launch("norm.cu", f"norm_{FLOATS[dtype]}", BLOCKS, [flat, flat.size, partial], flat, None)
        launch("norm.cu", "norm_total", 1, [partial, out], flat, None)


def clip_factor(squared: Array, max_norm: float, factor: Array, *, unscale: float = 1.0, stream: Any = None) -> None:
    """factor[0] = max_norm / norm if the norm is finite and above max_norm, otherwise 1. The host does not wait for it.

    Args:
        squared: float64[1] on the device, from squared_norm.
        max_norm: the largest allowed norm.
        factor: float64[1] on the device; overwritten. `Fused.factor` takes it.
        unscale: the norm is that of `unscale` times the values.
        stream: a CuPy stream in place of the current one.

    Raises as squared_norm does. Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural
    networks (2013), algorithm 1.
    """
    check("squared", squared, ["float64"], 1)
    check("factor", factor, ["float64"], 1)
    arguments = [squared, float(unscale), float(max_norm), factor]
    launch("norm.cu", "clip_factor", 1, arguments, squared, stream, threads=1)
