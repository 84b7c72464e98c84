"""States of mpitrain with tensors in place of arrays, as torch.save and torch.load(weights_only=True) need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of, tensor_of


def to_tensors(state: Any) -> Any:
    """Return a copy of dicts, lists and tuples of arrays and numbers, with tensors in place of arrays."""
    return _mapped(state, numpy.ndarray, lambda array: tensor_of(array.copy()))


def to_arrays(state: Any) -> Any:
    """Return a copy, with arrays in place of tensors."""
    return _mapped(state, torch.Tensor, lambda tensor: array_of(tensor).copy())


def _mapped(state: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(state, dict):
        return {key: _mapped(value, kind, change) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_mapped(value, kind, change) for value in state)
    if isinstance(state, numpy.generic):
        return state.item()
    return change(state) if isinstance(state, kind) else state
