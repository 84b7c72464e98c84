"""Operations on flat device buffers: sums, packing, scaling, the search for NaN and infinity, and the global norm.

The kernels are in bucket.cu and norm.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from mpitrain.arrays import Array, namespace
from mpitrain.cuda.kernels.launch import blocks_for, check, launch

FLOATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32", "float64": "f64"}
# Integers wrap, so signed integers are added as unsigned integers of the same size.
SUMMABLE = FLOATS | {f"{sign}int{8 * size}": f"u{8 * size}" for sign in ("", "u") for size in (1, 2, 4, 8)}
MOST_PARTS = 16  # in one launch of sum_of: bucket.cu's Parts
NORM_BLOCKS = 256  # per launch on any device, so that the order of the sum is the same; norm.cu has the same number
MOST_ARRAYS = 224  # in one launch of pack: bucket.cu's Table

_PARTS = numpy.dtype([("at", "u8", MOST_PARTS), ("count", "i8"), ("out", "u8", MOST_PARTS), ("num_out", "i8")])
_TABLE = numpy.dtype([("at", "u8", MOST_ARRAYS), ("start", "i8", MOST_ARRAYS + 1), ("count", "i8")])


def add(total: Array, arrived: Array) -> None:
    """total += arrived, each sum rounded once to the dtype; integers wrap.

    Args:
        total: flat device array of one of DTYPES; overwritten.
        arrived: flat device array, as many elements of the same dtype.

    Raises:
        ValueError: an array is different.
        KernelError: the kernels do not compile.
    """
    dtype = check("total", total, list(SUMMABLE))
    check("arrived", arrived, [dtype], total.size)
    if total.size:
        launch("bucket.cu", f"add_{SUMMABLE[dtype]}", _blocks(total), [total, arrived, total.size], total)


def sum_of(parts: Sequence[Array], out: Array, *, copies: Sequence[Array] = ()) -> None:
    """out = parts[0] + parts[1] + ... in this order, each sum rounded once, so equal calls give equal bits.

    Args:
        parts: one or more flat device arrays, of one of DTYPES, all of the same dtype and size. They may be memory of
            other processes or devices that this device can read.
        out: an array like the parts; overwritten. It may be one of them.
        copies: up to 15 more arrays like the parts, which get the sum in the same pass. They may be parts.

    More than 16 parts take another launch for every 15 of them. Raises as add does.
    """
    dtype = check("out", out, list(SUMMABLE))
    if not parts:
        raise ValueError("there are no parts; give at least one array")
    for number, part in enumerate(parts):
        _check_foreign(f"part {number}", part, out)
    if len(copies) >= MOST_PARTS:
        raise ValueError(f"there are {len(copies)} copies; at most {MOST_PARTS - 1} are written in one pass")
    for number, copy in enumerate(copies):
        _check_foreign(f"copy {number}", copy, out)
    if out.size == 0:
        return
    taken = list(parts[:MOST_PARTS])
    rest = list(parts[MOST_PARTS:])
    if any(part.data.ptr == out.data.ptr for part in rest):
        raise ValueError(f"out is one of the parts from {MOST_PARTS} on; it may be one of the first {MOST_PARTS}")
    while taken:
        table = numpy.zeros((), _PARTS)
        table["count"] = len(taken)
        table["at"][: len(taken)] = [part.data.ptr for part in taken]
        outputs = [out] if rest else [out, *copies]
        table["num_out"] = len(outputs)
        table["out"][: len(outputs)] = [one.data.ptr for one in outputs]
        launch("bucket.cu", f"sum_of_{SUMMABLE[dtype]}", _blocks(out), [table, out.size], out)
        taken = [out, *rest[: MOST_PARTS - 1]] if rest else []
        rest = rest[MOST_PARTS - 1 :]


def pack(arrays: Sequence[Array], flat: Array) -> None:
    """Copy the arrays into `flat`, one after the other, without gaps.

    One launch copies up to 224 arrays, whatever their shapes.

    Args:
        arrays: contiguous device arrays of any shape and the dtype of `flat`, with as many elements in total.
        flat: flat device array of one of DTYPES; overwritten.

    Raises as add does.
    """
    dtype = check("flat", flat, list(SUMMABLE))
    ends = [0]
    for number, array in enumerate(arrays):
        check(f"array {number}", array, [dtype], ndim=None)
        ends.append(ends[-1] + array.size)
    if ends[-1] != flat.size:
        raise ValueError(f"the arrays have {ends[-1]} elements together; flat has {flat.size}, and must have as many")
    for first in range(0, len(arrays), MOST_ARRAYS):
        members, starts = arrays[first : first + MOST_ARRAYS], ends[first : first + MOST_ARRAYS + 1]
        if starts[-1] == starts[0]:
            continue
        table = numpy.zeros((), _TABLE)
        table["count"] = len(members)
        table["at"][: len(members)] = [array.data.ptr for array in members]
        table["start"][: len(starts)] = starts
        blocks = blocks_for((starts[-1] - starts[0]) * flat.itemsize // 16 + 1, flat)
        launch("bucket.cu", f"pack_u{8 * flat.itemsize}", blocks, [table, flat], flat)


def scale(flat: Array, factor: float) -> None:
    """flat *= factor, rounded once. A factor of 0 clears `flat`, including NaN and infinity, as the exchange on the CPU
    does.

    Args:
        flat: flat device array, floating; overwritten.
        factor: used as float32; for a float64 array, as float64.

    Raises as add does.
    """
    dtype = check("flat", flat, list(FLOATS))
    factor = float(factor)
    number = numpy.float64(factor) if dtype == "float64" else numpy.float32(factor)
    if flat.size and factor != 1.0:
        launch("bucket.cu", f"scale_{FLOATS[dtype]}", _blocks(flat), [flat, number, flat.size], flat)


def all_finite(flat: Array, flag: Array) -> None:
    """Set flag[0] to 1 if `flat` holds infinity or NaN. The flag is never cleared.

    Args:
        flat: flat device array, floating.
        flag: int32[1] on the device.

    Raises as add does.
    """
    dtype = check("flat", flat, list(FLOATS))
    check("flag", flag, ["int32"], 1)
    if flat.size:
        launch("bucket.cu", f"all_finite_{FLOATS[dtype]}", _blocks(flat), [flat, flag, flat.size], flat)


def squared_norm(flat: Array, out: Array) -> None:
    """out[0] = the sum of the squares of `flat`, computed in float64.

    Equal values give equal bits, on any device and at any address. The sum is infinite or NaN if a value is, and
    infinite if it exceeds the range of float64.

    Args:
        flat: flat device array, floating.
        out: float64[1] on the device; overwritten.

    Raises:
        ValueError: an array is different.
        KernelError: the kernels do not compile.
    """
    dtype = check("flat", flat, list(FLOATS))
    check("out", out, ["float64"], 1)
    cupy = namespace(flat)
    partial = cupy.empty(NORM_BLOCKS, cupy.float64)
    launch("norm.cu", f"norm_{FLOATS[dtype]}", NORM_BLOCKS, [flat, flat.size, partial], flat)
    launch("norm.cu", "norm_total", 1, [partial, out], flat)


def clip_factor(squared: Array, max_norm: float, factor: Array) -> None:
    """factor[0] = max_norm / norm if the norm is finite and above max_norm, otherwise 1. The CPU does not wait for it.

    Args:
        squared: float64[1] on the device, from squared_norm.
        max_norm: the largest allowed norm.
        factor: float64[1] on the device; overwritten. `Fused.factor` takes it.

    Raises as squared_norm does. Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural
    networks (2013), algorithm 1.
    """
    check("squared", squared, ["float64"], 1)
    check("factor", factor, ["float64"], 1)
    arguments = [squared, float(max_norm), factor]
    launch("norm.cu", "clip_factor", 1, arguments, squared, threads=1)


def _blocks(flat: Array) -> int:
    return blocks_for(flat.nbytes // 16 + 1, flat)


def _check_foreign(argument: str, part: Array, out: Array) -> None:
    """Like check, for memory that may belong to another device."""
    if part.dtype != out.dtype or part.shape != out.shape or not part.flags.c_contiguous:
        raise ValueError(
            f"{argument} is {part.dtype} {part.shape}; it must be contiguous and as out: {out.dtype} {out.shape}"
        )
    if isinstance(part, numpy.ndarray):
        raise ValueError(f"{argument} is a numpy.ndarray; it must be a cupy.ndarray, on a device")
