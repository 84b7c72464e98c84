"""A Python value as frames: a short pickle, and the bytes of every array in it, as they lie in memory.

    frames[0]    the pickle (protocol 5): the nesting, and shape, dtype and order of each array
    frames[1:]   the bytes of the arrays; an array that occurs twice is there once

A contiguous array that can be written to, in C or Fortran order, is not copied. Source: PEP 574, Pickle protocol 5 with
out-of-band data.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy

# Flat byte arrays.
Frames: TypeAlias = list[numpy.ndarray]


def pack(value: Any) -> Frames:
    """Return the frames of `value`. They share the memory of its arrays.

    Raises:
        Exception: `value` cannot be pickled. The class is that of pickle, or of the class of a value in it.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _ArrayPickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return [numpy.asarray(stream.getbuffer()), *(numpy.asarray(buffer.raw()) for buffer in buffers)]


def unpack(frames: Frames) -> Any:
    """Return the value. Its arrays are the frames' memory."""
    return pickle.loads(frames[0].data, buffers=frames[1:])


def copied(frames: Frames) -> Frames:
    """Return the frames in new memory, as if they had come from another rank."""
    return [frame.copy() for frame in frames]


class _ArrayPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # NumPy itself leaves out-of-band only what is contiguous and has a dtype that the buffer protocol knows.
        if type(value) is numpy.ndarray and not value.dtype.hasobject and value.dtype.itemsize:
            order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            # pickle would make the copy of a read-only array read-only too.
            whole = value if value.flags.forc and value.flags.writeable else value.copy(order)
            flat = whole.reshape(-1, order=order).view(numpy.uint8)
            return _array_from, (pickle.PickleBuffer(flat.data), value.dtype, value.shape, order)
        return NotImplemented


def _array_from(buffer: Any, dtype: numpy.dtype, shape: Sequence[int], order: Literal["C", "F"]) -> numpy.ndarray:
    return numpy.ndarray(tuple(shape), dtype, buffer, order=order)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def why_not(function: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """Say which of these cannot be pickled, and what to do; "" if each of them can."""
    if problem := _problem(function):
        return (
            f"the function {name_of(function)} cannot be sent: {problem}. A rank finds a function by its name: define "
            "it at the top level of a module or of the script, and give it what it needs as arguments"
        )
    for number, argument in enumerate(arguments, 1):
        if problem := _problem(argument):
            return (
                f"argument {number} of {name_of(function)}, of type {type(argument).__name__}, cannot be sent: "
                f"{problem}. Give the function values from which it makes that itself"
            )
    return ""


def _problem(value: Any) -> str:
    try:
        pack(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
