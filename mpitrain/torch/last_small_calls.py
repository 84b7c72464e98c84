"""The last small calls of a process group, kept alive for PyTorch's C++ code.

PyTorch's C++ code may keep a work that Python began, and use it when nothing in Python refers to it any more: in the
backward pass, DistributedDataParallel waits for the one-element sums of its `join`. A work without its Python half
waits for ever. So the last small works are kept.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mpitrain.torch.work import Call

_NUM_CALLS = 256
_MOST_BYTES = 1024


class LastSmallCalls:
    """Holds a reference to each of the last small calls."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=_NUM_CALLS)

    def keep(self, call: Call) -> None:
        """Keep a call, if its tensors are small."""
        # Input tensors count too; a part of a tensor counts as the whole tensor's memory.
        tensors = (*call.results, *call.buffers.kept)
        if sum(_size(tensor) for tensor in tensors) <= _MOST_BYTES:
            self._calls.append(call)


def _size(tensor: torch.Tensor) -> float:
    """Return the size of the tensor's memory in bytes; infinity for a sparse tensor, which may grow to any size."""
    return math.inf if tensor.is_sparse else tensor.untyped_storage().nbytes()
