"""Tensors as NumPy arrays over the same memory."""

from __future__ import annotations

import numpy
import torch

from mpitrain.allreduce.algorithm import BFLOAT16


def array_of(tensor: torch.Tensor) -> numpy.ndarray:
    """Return an array over a CPU tensor's memory, with its shape and strides; bfloat16 becomes that of ml_dtypes.

    Raises:
        TypeError: NumPy has no such dtype or layout (float8, sparse, quantized), or the tensor is not on the CPU.
    """
    detached = tensor.detach()
    if detached.dtype == torch.bfloat16:
        return detached.view(torch.uint16).numpy().view(BFLOAT16)
    return detached.numpy()


def tensor_of(array: numpy.ndarray) -> torch.Tensor:
    """Return a CPU tensor over a writable array's memory. This reverses `array_of`."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(numpy.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
