"""The buffers of a prepared model with virtual ranks; see mpitrain/adapters/torch_buffers.py for the rule.

Each virtual rank begins with the same buffers. Their changes are exchanged as mt.TorchModule does it: those of floating
buffers with the gradients, the values of the others with the remarks of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy
import torch

from mpitrain.adapters.torch_buffers import ModuleBuffers, Values
from mpitrain.exchange.bucket import Parameter
from mpitrain.torch.drawn import Share


class ChangedBuffers:
    """The buffers of one model on one rank. Each step calls `begin`, `changed`, `end`, as with BufferMeans."""

    def __init__(self, buffers: ModuleBuffers, dtype: torch.dtype) -> None:
        """`dtype` is that of the changes."""
        self._buffers, self._dtype = buffers, dtype
        wide = numpy.dtype(str(dtype).removeprefix("torch."))
        self.layout = [Parameter(name, tuple(buffers.tensor(name).shape), wide) for name in buffers.floats]

    def begin(self, share: Share | None = None) -> None:
        """Begin a pass of a virtual rank. Nothing is sent."""
        self._buffers.keep([*self._buffers.floats, *self._buffers.others])

    def floats(self) -> Iterator[numpy.ndarray]:
        """Yield the changes of the floating buffers since `begin`, in the order of `layout`."""
        return self._buffers.changes(self._dtype, 1)

    def changed(self) -> tuple[tuple[str, ...], Values]:
        """Return no floating buffers, and the changed values of the others since `begin`."""
        return (), self._buffers.changed_others()

    def put_back(self) -> None:
        """Undo the changes since `begin`."""
        self._buffers.put_back()

    def end(self, changed: Sequence[str], others: Sequence[Values]) -> None:
        """Take the ranks' values of buffers that are not floating, in rank order. `changed` is empty."""
        self._buffers.settle_others(others)

    def add(self, changes: Sequence[numpy.ndarray]) -> None:
        """Add the means of the changes to the floating buffers, in the order of `layout`."""
        self._buffers.add({entry.name: change for entry, change in zip(self.layout, changes, strict=True)})
