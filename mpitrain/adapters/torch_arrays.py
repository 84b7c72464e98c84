"""Tensors as NumPy arrays over the same memory, and batches of arrays in the form that a module takes."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from mpitrain.allreduce.algorithm import BFLOAT16
from mpitrain.arrays import is_array
from mpitrain.tree import Leaf, Tree, leaves, plain_leaves, rebuild


def array_of(tensor: torch.Tensor) -> numpy.ndarray:
    """Return an array over a CPU tensor's memory, with its shape and strides; bfloat16 becomes the dtype of ml_dtypes.

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


def is_empty(batch: Tree) -> bool:
    """True if the batch has arrays of samples, but no sample."""
    lengths = [len(leaf) for _, leaf in leaves(batch) if is_array(leaf) and leaf.ndim]
    return bool(lengths) and not any(lengths)


def as_tensors(batch: Tree) -> Any:
    """Return the same nesting with tensors in place of arrays."""
    tensors = (_tensor(leaf) for _, leaf in plain_leaves(batch))
    return rebuild(batch, tensors.__next__)


def _tensor(leaf: Leaf) -> Any:
    """Return a tensor over the same memory, if PyTorch can use it: writable, and no negative stride."""
    if not is_array(leaf):
        return leaf
    if not leaf.flags.writeable or any(step < 0 for step in leaf.strides):
        leaf = leaf.copy()
    return tensor_of(leaf)
