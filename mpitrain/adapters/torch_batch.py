"""A batch of arrays in the form that a module takes."""

from __future__ import annotations

from typing import Any

from mpitrain.adapters.torch_arrays import tensor_of
from mpitrain.arrays import is_array
from mpitrain.tree import Leaf, Tree, leaves, rebuild


def is_empty(batch: Tree) -> bool:
    """True if the batch has arrays of samples, but no sample."""
    lengths = [len(leaf) for _, leaf in leaves(batch) if is_array(leaf) and leaf.ndim]
    return bool(lengths) and not any(lengths)


def as_tensors(batch: Tree) -> Any:
    """Return the same nesting with tensors in place of arrays."""
    tensors = (_tensor(leaf) for _, leaf in leaves(batch))
    return rebuild(batch, tensors.__next__)


def _tensor(leaf: Leaf) -> Any:
    """Return a tensor over the same memory, if PyTorch can use it: writable, and no negative stride."""
    if not is_array(leaf):
        return leaf
    if not leaf.flags.writeable or any(step < 0 for step in leaf.strides):
        leaf = leaf.copy()
    return tensor_of(leaf)
