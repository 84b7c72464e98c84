"""Copies between device arrays and the host buffers that MPI works on."""

from __future__ import annotations

import numpy

from mpitrain.arrays import Array, is_device_array, namespace


def copy_to_host(source: Array, target: numpy.ndarray) -> None:
    """Copy `source` (host or device) into `target` of the same shape and dtype; complete on return."""
    if is_device_array(source):
        source.get(out=target) if source.flags.c_contiguous else numpy.copyto(target, source.get())
    else:
        numpy.copyto(target, source, casting="no")


def like(source: numpy.ndarray, model: Array) -> Array:
    """Return `source` where `model` is: `source` itself on the host, or a copy on the current device."""
    return namespace(model).asarray(source) if is_device_array(model) else source
