"""What counts as an array: `numpy.ndarray` on the CPU or `cupy.ndarray` on a GPU. CuPy is never imported here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, TypeAlias

import numpy

from mpitrain.errors import TreeError

# CuPy has no usable type stubs, so mypy sees Any; at run time it is one of the two array classes.
Array: TypeAlias = Any


def is_device_array(value: object) -> bool:
    """True for a CuPy array. An array can only be CuPy's where CuPy has been imported already."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def is_array(value: object) -> bool:
    """True for a NumPy or CuPy array (NumPy's own scalars are numbers, not arrays)."""
    return isinstance(value, numpy.ndarray) or is_device_array(value)


def namespace(array: Array) -> ModuleType:
    """The module whose functions work on `array`: numpy or cupy."""
    return sys.modules["cupy"] if is_device_array(array) else numpy


_VIEWS = (numpy.matrix, numpy.recarray)  # only another view of the same values
_PLAIN = (numpy.ndarray, numpy.memmap, *_VIEWS)


def check_class(value: object, label: str) -> None:
    """Raise TreeError for an array whose class holds more than values, such as a mask or a unit: an exchange would lose
    that. `label` says where the array is."""
    if isinstance(value, numpy.ndarray) and type(value) not in _PLAIN:
        kind = type(value)
        masked = isinstance(value, numpy.ma.MaskedArray)
        advice = "x.filled(0) and numpy.ma.getmaskarray(x)" if masked else "numpy.asarray(x), without unit or label,"
        raise TreeError(
            f"{label} is a {kind.__module__.partition('.')[0]} {kind.__name__}, and would lose what it holds "
            f"besides its values; give {advice} instead, or send the whole object with World.allgather or "
            "World.broadcast_object"
        )


def of_class(array: numpy.ndarray, model: Array) -> Array:
    """Return a host array as a matrix or a record array if `model` is one."""
    return array.view(type(model)) if type(model) in _VIEWS else array


def copy_to_host(source: Array, target: numpy.ndarray) -> None:
    """Copy `source` (host or device) into `target` of the same shape and dtype; complete on return."""
    if is_device_array(source):
        source.get(out=target) if source.flags.c_contiguous else numpy.copyto(target, source.get())
    else:
        numpy.copyto(target, source, casting="no")


def like(source: numpy.ndarray, model: Array) -> Array:
    """Return `source` where `model` is, and of its class: a view on the host, or a copy on the current device."""
    return namespace(model).asarray(source) if is_device_array(model) else of_class(source, model)
