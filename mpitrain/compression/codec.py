"""The interface of codecs: from float32 values to the bytes that travel, and back.

All arrays are one-dimensional, contiguous and on the CPU. Sums are made in float32, never in the wire's format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy

# The number of values that fit into a codec's scratch memory. More values are processed in pieces of this size.
PIECE_VALUES = 65536


class DeviceCode(NamedTuple):
    """The kernels that code on a GPU, with the same bits as the codec on the CPU.

    Attributes:
        file: the file in mpitrain/cuda/kernels; its kernels are `encode_NAME`, `decode_NAME` and `add_decoded_NAME`, by
            the codec's name, with the arguments of those in codec.cu.
        parts: returns the dtype and length of the arrays in a wire of so many values.
    """

    file: str
    parts: Callable[[int], list[tuple[numpy.dtype, int]]]


class Codec(Protocol):
    """The result of a factory in CODECS. Its only state is scratch memory, so an object serves one caller at a time."""

    name: str
    compiled: bool  # True: by Numba; False: NumPy passes, which give the same bits and are slower
    may_overflow: bool  # a finite value may become infinite
    gathered: bool  # a sum is not coded again: every rank gets all wires; otherwise see allreduce/direct.py
    # The largest error of a decoded value in the codec's usual range, relative to the largest |value| of the array. The
    # contract tests refuse a bound of more than four times what they find.
    relative_error: float
    device_code: DeviceCode | None  # None: gradients on a GPU are coded on the CPU

    def wire_bytes(self, count: int) -> int:
        """Return the number of bytes that `count` values take on the wire."""
        ...

    def encode(self, values: numpy.ndarray, wire: numpy.ndarray, error: numpy.ndarray | None = None) -> None:
        """Overwrite `wire` with the encoded values; overwrite `error`, if given, with values - decode(wire) in float32.

        If the decoded value is not finite, `error` is 0, because infinity and NaN must not stay in a residual. Decoded
        values give the same wire when they are encoded again: ranks that pass a sum on must not change it.

        Args:
            values: float32[n].
            wire: uint8[wire_bytes(n)].
            error: float32[n]; either exactly the memory of `values`, or disjoint from it.

        Raises:
            ValueError: the arrays do not fit together.
        """
        ...

    def decode(self, wire: numpy.ndarray, values: numpy.ndarray) -> None:
        """Overwrite `values`, float32[n], with the content of `wire`, uint8[wire_bytes(n)]. Raises as encode does."""
        ...

    def add(self, wire: numpy.ndarray, total: numpy.ndarray) -> None:
        """Add decode(wire) to `total`, float32[n], with one float32 addition per value. Raises as encode does."""
        ...

    def is_valid(self, wire: numpy.ndarray, values: numpy.ndarray) -> bool:
        """Return whether `wire` can be decoded into `values`. decode and add do not check this."""
        ...


class Passes(NamedTuple):
    """The actual work, on the arrays in a wire. `error` is empty if the caller does not need it."""

    encode: Callable[[numpy.ndarray, tuple[numpy.ndarray, ...], numpy.ndarray], None]  # values, parts, error
    decode: Callable[[tuple[numpy.ndarray, ...], numpy.ndarray], None]  # parts, values
    add: Callable[[tuple[numpy.ndarray, ...], numpy.ndarray], None]  # parts, total


class ArrayCodec:
    """A Codec whose wire consists of a few consecutive arrays."""

    def __init__(
        self,
        name: str,
        parts: Callable[[int], list[tuple[numpy.dtype, int]]],
        passes: Passes,
        compiled: bool,
        *,
        relative_error: float,
        may_overflow: bool = False,
        gathered: bool = False,
        places_exist: Callable[[tuple[numpy.ndarray, ...], int], bool] = lambda *_: True,
        device_file: str | None = None,
    ) -> None:
        """
        Args:
            name: the name of the codec.
            parts: returns the dtype and length of the arrays in a wire of so many values.
            passes: the work.
            compiled: see Codec.
            relative_error: see Codec.
            may_overflow: see Codec.
            gathered: see Codec.
            places_exist: checks the places, in the arrays of a wire, to which decoding would write.
            device_file: the file in mpitrain/cuda/kernels with the codec's kernels, if there are any.
        """
        self.name = name
        self.relative_error = relative_error
        self.may_overflow = may_overflow
        self.gathered = gathered
        self.device_code = None if device_file is None else DeviceCode(device_file, parts)
        self.compiled = compiled
        self._parts = parts
        self._passes = passes
        self._places_exist = places_exist
        self._no_error = numpy.empty(0, numpy.float32)

    def wire_bytes(self, count: int) -> int:
        """See Codec."""
        return sum(dtype.itemsize * length for dtype, length in self._parts(count))

    def encode(self, values: numpy.ndarray, wire: numpy.ndarray, error: numpy.ndarray | None = None) -> None:
        """See Codec."""
        if error is None:
            error = self._no_error
        elif error.shape != values.shape or error.dtype != numpy.float32:
            raise ValueError(f"{self.name}: error is {error.dtype} {error.shape}; it must be float32 {values.shape}")
        self._passes.encode(values, self._arrays(wire, values), error)

    def decode(self, wire: numpy.ndarray, values: numpy.ndarray) -> None:
        """See Codec."""
        self._passes.decode(self._arrays(wire, values), values)

    def add(self, wire: numpy.ndarray, total: numpy.ndarray) -> None:
        """See Codec."""
        self._passes.add(self._arrays(wire, total), total)

    def is_valid(self, wire: numpy.ndarray, values: numpy.ndarray) -> bool:
        """See Codec."""
        return self._places_exist(self._arrays(wire, values), values.size)

    def _arrays(self, wire: numpy.ndarray, values: numpy.ndarray) -> tuple[numpy.ndarray, ...]:
        """Return the arrays in `wire`. Check the sizes here, because compiled code checks no bounds."""
        if values.ndim != 1 or values.dtype != numpy.float32 or not values.flags.c_contiguous:
            raise ValueError(
                f"{self.name}: values are {values.dtype} {values.shape}; they must be float32, one-dimensional and "
                "contiguous"
            )
        expected = self.wire_bytes(values.size)
        if wire.shape != (expected,) or wire.dtype != numpy.uint8 or not wire.flags.c_contiguous:
            raise ValueError(
                f"{self.name}: the wire of {values.size} values is {wire.dtype} {wire.shape}; it must be uint8 "
                f"({expected},) and contiguous"
            )
        arrays, start = [], 0
        for dtype, length in self._parts(values.size):
            stop = start + dtype.itemsize * length
            arrays.append(wire[start:stop].view(dtype))
            start = stop
        return tuple(arrays)
