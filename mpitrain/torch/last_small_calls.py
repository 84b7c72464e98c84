"""The last small calls of a process group, kept for PyTorch's C++.

PyTorch's C++ may keep a work that Python has begun, and use it when nothing in Python refers to it any more: in the
backward pass, DistributedDataParallel waits for the one-element sums of its `join`. A work without its Python half
waits for ever. So a number of the last small works is kept.
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
        # Tensors that are read count too; a part of a tensor counts with the whole tensor's memory.
        tensors = (*call.results, *call.buffers.kept)
        if sum(_size(tensor) for tensor in tensors) <= _MOST_BYTES:
            self._calls.append(call)


def _size(tensor: torch.Tensor) -> float:
    """Return the bytes of the tensor's memory; infinity for a sparse tensor, which may become of any size."""
    return math.inf if tensor.is_sparse else tensor.untyped_storage().nbytes()
