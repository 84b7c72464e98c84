"""Operations on flat device buffers: sums, packing, scaling, and the search for NaN and infinity. The kernels are in
bucket.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda.kernels.launch import blocks_for, check, launch

FLOATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "f32", "float64": "f64"}
# Integers wrap, so signed integers are added as unsigned integers of the same size.
SUMMABLE = FLOATS | {f"{sign}int{8 * size}": f"u{8 * size}" for sign in ("", "u") for size in (1, 2, 4, 8)}
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
MOST_PARTS = 16  # in one launch of sum_of: bucket.cu's Parts
MOST_ARRAYS = 224  # in one launch of pack and unpack: bucket.cu's Table

_PARTS = numpy.dtype([("at", "u8", MOST_PARTS), ("count", "i8"), ("out", "u8", MOST_PARTS), ("num_out", "i8")])
_TABLE = numpy.dtype([("at", "u8", MOST_ARRAYS), ("start", "i8", MOST_ARRAYS + 1), ("count", "i8")])


def add(total: Array, arrived: Array, *, copy: Array | None = None, stream: Any = None) -> None:
    """total += arrived, each sum rounded once to the dtype of `total`; integers wrap.

    Args:
        total: flat device array of one of DTYPES; overwritten.
        arrived: flat device array, as many elements of the same dtype.
        copy: bfloat16 or float16 array of as many elements, or None; overwritten with the new total, rounded. With it,
            `total` must be float32, and `arrived` float32 or of the dtype of `copy`.
        stream: a CuPy stream in place of the current one.

    Raises:
        ValueError: an array is different.
        KernelError: the kernels do not compile.
    """
    if copy is None:
        dtype = check("total", total, list(SUMMABLE))
        check("arrived", arrived, [dtype], total.size)
        name = f"add_{SUMMABLE[dtype]}"
    else:
        check("total", total, ["float32"])
        to = check("copy", copy, list(SHORT), total.size)
        arriving = check("arrived", arrived, ["float32", to], total.size)
        name = f"add_{FLOATS[arriving]}_cast_{SHORT[to]}"
    if total.size:
        copies = [] if copy is None else [copy]
        launch("bucket.cu", name, _blocks(total), [total, arrived, *copies, total.size], total, stream)


def sum_of(parts: Sequence[Array], out: Array, *, copies: Sequence[Array] = (), stream: Any = None) -> None:
    """out = parts[0] + parts[1] + ... in this order, each sum rounded once, so equal calls give equal bits.

    Args:
        parts: one or more flat device arrays, of one of DTYPES, all of the same dtype and size. They may be memory of
            other processes or devices that this device can read.
        out: an array like the parts; overwritten. It may be one of them.
        copies: up to 15 more arrays like the parts, which get the sum in the same pass. They may be parts.
        stream: a CuPy stream in place of the current one.

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
        launch("bucket.cu", f"sum_of_{SUMMABLE[dtype]}", _blocks(out), [table, out.size], out, stream)
        taken = [out, *rest[: MOST_PARTS - 1]] if rest else []
        rest = rest[MOST_PARTS - 1 :]


def pack(arrays: Sequence[Array], flat: Array, *, stream: Any = None) -> None:
    """Copy the arrays into `flat`, one after the other, without gaps.

    One launch copies up to 224 consecutive arrays of one dtype, whatever their shapes.

    Args:
        arrays: contiguous device arrays of any shape, with as many elements in total as `flat`. Each has the dtype of
            `flat`; if that is float32, bfloat16 and float16 are also allowed.
        flat: flat device array of one of DTYPES; overwritten.
        stream: a CuPy stream in place of the current one.

    Raises as add does.
    """
    _move("pack", arrays, flat, stream)


def unpack(flat: Array, arrays: Sequence[Array], *, stream: Any = None) -> None:
    """Reverse pack: overwrite the arrays with the content of `flat`, rounded to narrower dtypes.

    The arguments are those of pack. Raises as add does.
    """
    _move("unpack", arrays, flat, stream)


def _move(operation: str, arrays: Sequence[Array], flat: Array, stream: Any) -> None:
    into = check("flat", flat, list(SUMMABLE))
    allowed = ["float32", *SHORT] if into == "float32" else [into]
    runs: list[tuple[str, list[Array], list[int]]] = []  # dtype, arrays, starts
    place = 0
    for number, array in enumerate(arrays):
        dtype = check(f"array {number}", array, allowed, ndim=None)
        if not runs or runs[-1][0] != dtype or len(runs[-1][1]) == MOST_ARRAYS:
            runs.append((dtype, [], []))
        runs[-1][1].append(array)
        runs[-1][2].append(place)
        place += array.size
    if place != flat.size:
        raise ValueError(f"the arrays have {place} elements together; flat has {flat.size}, and must have as many")
    for dtype, members, starts in runs:
        end = starts[-1] + members[-1].size
        if end == starts[0]:
            continue
        table = numpy.zeros((), _TABLE)
        table["count"] = len(members)
        table["at"][: len(members)] = [array.data.ptr for array in members]
        table["start"][: len(members) + 1] = [*starts, end]
        kind = f"u{8 * flat.itemsize}" if dtype == into else f"{SHORT[dtype]}_f32"
        blocks = blocks_for((end - starts[0]) * flat.itemsize // 16 + 1, flat)
        launch("bucket.cu", f"{operation}_{kind}", blocks, [table, flat], flat, stream)


def scale(flat: Array, factor: float, *, stream: Any = None) -> None:
    """flat *= factor, rounded once. A factor of 0 clears `flat`, also NaN and infinity, as the exchange on the host
    does.

    Args:
        flat: flat device array, floating; overwritten.
        factor: used as float32; for a float64 array, as float64.
        stream: a CuPy stream in place of the current one.

    Raises as add does.
    """
    dtype = check("flat", flat, list(FLOATS))
    factor = float(factor)
    number = numpy.float64(factor) if dtype == "float64" else numpy.float32(factor)
    if flat.size and factor != 1.0:
        launch("bucket.cu", f"scale_{FLOATS[dtype]}", _blocks(flat), [flat, number, flat.size], flat, stream)


def all_finite(flat: Array, flag: Array, *, stream: Any = None) -> None:
    """Set flag[0] to 1 if `flat` holds infinity or NaN. The flag is never cleared.

    Args:
        flat: flat device array, floating.
        flag: int32[1] on the device.
        stream: a CuPy stream in place of the current one.

    Raises as add does.
    """
    dtype = check("flat", flat, list(FLOATS))
    check("flag", flag, ["int32"], 1)
    if flat.size:
        launch("bucket.cu", f"all_finite_{FLOATS[dtype]}", _blocks(flat), [flat, flag, flat.size], flat, stream)


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
