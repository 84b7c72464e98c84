"""The codecs of mpitrain.compression on device arrays, with the same bits."""

from __future__ import annotations

from functools import cache
from typing import Any

from mpitrain.arrays import Array
from mpitrain.compression import CODECS
from mpitrain.compression.codec import DeviceCode
from mpitrain.cuda.kernels.launch import blocks_for, check, check_aligned, launch


def wire_bytes(codec: str, count: int) -> int:
    """Return the bytes that `count` values take on the wire, as the CPU codec does. Raises ValueError."""
    return sum(dtype.itemsize * length for dtype, length in _parts(codec, count))


def encode(codec: str, values: Array, wire: Array, error: Array | None = None) -> None:
    """Overwrite `wire` with the encoded values; overwrite `error`, if given, with values - decode(wire).

    `error` is 0 where the decoded value is not finite.

    Args:
        codec: the name of a codec with kernels.
        values: float32[n], flat on the device.
        wire: uint8[wire_bytes(codec, n)], flat on the device; it begins at a multiple of 4 bytes.
        error: float32[n]; either exactly the memory of `values`, or disjoint from it.

    Raises:
        ValueError: the arrays do not fit together, or there is no such codec.
        KernelError: the kernels do not compile.
    """
    arrays = _arrays(codec, values, wire)
    if error is not None:
        check("error", error, ["float32"], values.size)
    if values.size:
        code = _device_code(codec)
        launch(
            code.file,
            f"encode_{codec}",
            blocks_for(-(-values.size // 4), values),
            [values, *arrays, error, values.size],
            values,
        )


def decode(codec: str, wire: Array, values: Array) -> None:
    """Overwrite `values` with the content of `wire`. Arguments and Raises as for encode."""
    _read("decode", codec, wire, values)


def add_decoded(codec: str, wire: Array, total: Array) -> None:
    """Add decode(wire) to `total`, with one float32 addition per value. Arguments and Raises as for encode."""
    _read("add_decoded", codec, wire, total)


def _read(operation: str, codec: str, wire: Array, values: Array) -> None:
    arrays = _arrays(codec, values, wire)
    if values.size:
        blocks = blocks_for(-(-values.size // 4), values)
        code = _device_code(codec)
        arguments = [*arrays, values, values.size]
        launch(code.file, f"{operation}_{codec}", blocks, arguments, values)


def _parts(codec: str, count: int) -> list[Any]:
    return _device_code(codec).parts(count)


@cache
def _device_code(codec: str) -> DeviceCode:
    code = CODECS[codec](False).device_code if codec in CODECS else None
    if code is None:
        known = ", ".join(name for name in sorted(CODECS) if CODECS[name](False).device_code is not None)
        raise ValueError(f"there is no codec {codec!r} on the device; known: {known}")
    return code


def _arrays(codec: str, values: Array, wire: Array) -> list[Array]:
    """Return the arrays in `wire`."""
    check("values", values, ["float32"])
    check("wire", wire, ["uint8"], wire_bytes(codec, values.size))
    check_aligned("wire", wire, 4)
    arrays, start = [], 0
    for dtype, length in _parts(codec, values.size):
        stop = start + dtype.itemsize * length
        part = wire[start:stop]
        # Codes are passed as bytes; a launch does not check dtypes.
        arrays.append(part if dtype.itemsize == 1 else part.view(dtype))
        start = stop
    return arrays
