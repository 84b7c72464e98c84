"""The buffers of a prepared model in rounds; see mpitrain/adapters/torch_buffers.py for the rule.

A floating buffer is this rank's own until an outer step, where it becomes the mean over the ranks. A buffer of another
dtype is the same on all ranks after every backward pass, as without rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpitrain.adapters.torch_buffers import ModuleBuffers, Values
from mpitrain.torch.drawn import Share


class OwnBuffers:
    """The buffers of one model on one rank. Each exchange calls `begin`, `changed`, `end`, as with BufferMeans."""

    def __init__(self, buffers: ModuleBuffers) -> None:
        self._buffers = buffers
        self._share = Share(1, 1)

    def begin(self, share: Share) -> None:
        """Note the share of the batch. Nothing is sent."""
        self._share = share

    def changed(self) -> tuple[tuple[str, ...], Values]:
        """Return no floating buffers, and this rank's values of the others. What has no samples does not count."""
        if not self._share.count:
            self._buffers.put_back()
        return (), self._buffers.changed_others()

    def end(self, changed: Sequence[str], others: Sequence[Values]) -> None:
        """Take the ranks' values of buffers that are not floating, in rank order. `changed` is empty."""
        self._buffers.keep(self._buffers.floats)
        self._buffers.settle_others(others)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """In this block, floating buffers have the values from before the forward pass."""
        now = {name: self._buffers.tensor(name).clone() for name in self._buffers.moved(self._buffers.floats)}
        self._buffers.put_back(now)
        try:
            yield
        finally:
            for name, values in now.items():
                self._buffers.tensor(name).copy_(values)

    def passed(self, share: Share) -> None:
        """End a backward pass without an exchange."""
        if not share.count:
            self._buffers.put_back(self._buffers.floats)
        self._buffers.keep(self._buffers.floats)
