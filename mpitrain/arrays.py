"""What an array is: `numpy.ndarray` on the host or `cupy.ndarray` on a device. CuPy is never imported here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, TypeAlias

import numpy

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
