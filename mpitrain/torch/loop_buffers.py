"""The buffers of a prepared model; see mpitrain/adapters/torch_buffers.py for the rule.

BufferMeans      of every step: their means are sums of their own, in float64
OwnBuffers       with local updates: each rank has its own, up to an outer step
ChangedBuffers   with virtual ranks: the changes go with the gradients, as mt.TorchModule does it
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakMethod

import numpy
import torch

from mpitrain import collectives
from mpitrain.adapters.torch_arrays import array_of
from mpitrain.adapters.torch_buffers import ModuleBuffers, Values
from mpitrain.arrays import Array
from mpitrain.reducer.unexchanged import say_buffers_at_end
from mpitrain.torch.drawn import Share
from mpitrain.world.world import World


class LoopBuffers:
    """The buffers of one model on one rank. Each step calls `begin`, `changed`, `send`, `end`."""

    def __init__(self, buffers: ModuleBuffers) -> None:
        self._buffers = buffers
        self._share = Share(1, 1)

    def begin(self, share: Share) -> None:
        """Note the share of the batch. Nothing is sent yet, because the ranks may refuse the step."""
        self._share = share

    def send(self) -> None:
        """Begin to exchange the buffers that do not go with the gradients. Do not wait."""

    def changed(self) -> tuple[tuple[str, ...], Values]:
        """Return floating buffers that are to be exchanged from now on, and this rank's values of the others.

        Not collective.
        """
        return (), self._buffers.changed_others()

    def end(self, changed: Sequence[str], others: Sequence[Values]) -> None:
        """Make buffers equal on all ranks before returning.

        Args:
            changed: names of floating buffers that some rank's `changed` has returned.
            others: the ranks' values of the buffers that are not floating-point, in rank order.
        """
        self._buffers.settle_others(others)

    def settle(self, share: Share) -> None:
        """Exchange changes from forward passes that no backward pass followed. Collective.

        `share` is that of the samples since the last exchange.
        """


class BufferMeans(LoopBuffers):
    """In every step, floating buffers become means over the samples. Afterwards all buffers are equal on all ranks.

    The means are summed in float64 and rounded once, so a buffer of 32 bits or fewer that is equal on all ranks stays
    as it is. The buffers of norm layers are known to change, because their kernels leave no trace. They are exchanged
    with the last gradients. For other buffers, a change is detected; from then on they are exchanged too. A table that
    never changes is never sent.
    """

    def __init__(self, world: World, buffers: ModuleBuffers) -> None:
        super().__init__(buffers)
        self._world = world
        self._moving = self._buffers.moved(self._buffers.floats)
        self._begun: collectives.Handle[Array] | None = None
        if world.size > 1:
            say_buffers_at_end(world, WeakMethod(self._at_end))

    def _at_end(self) -> tuple[float, float]:
        """This rank's description of the buffers when all have finished; see reducer/unexchanged.py."""
        floats, others = self._buffers.moved(self._buffers.floats), self._buffers.changed_others()
        return float(bool(others)), float(zlib.crc32(repr(others).encode(), self._checksum(floats)))

    def _checksum(self, names: Sequence[str]) -> int:
        checksum = 0
        for name in names:
            checksum = zlib.crc32(array_of(self._buffers.tensor(name)).tobytes(), zlib.crc32(name.encode(), checksum))
        return checksum

    def send(self) -> None:
        """See LoopBuffers: the buffers that are known to change."""
        self._begun = self._exchange(self._moving)

    def changed(self) -> tuple[tuple[str, ...], Values]:
        """See LoopBuffers: the buffers that changed for the first time."""
        still = [name for name in self._buffers.floats if name not in self._moving]
        return tuple(self._buffers.moved(still)), self._buffers.changed_others()

    def end(self, changed: Sequence[str], others: Sequence[Values]) -> None:
        """See LoopBuffers. `changed` are exchanged now, and in every later step."""
        self._take(self._moving, self._begun)
        self._begun = None
        self._take(changed, self._exchange(changed))
        self._moving = [*self._moving, *changed]
        # A rank without samples does not count. A change that only it made must not remain and count in a later step.
        own = self._buffers.moved(name for name in self._buffers.floats if name not in self._moving)
        self._buffers.put_back(own)
        self._buffers.keep(own)
        super().end(changed, others)

    def settle(self, share: Share) -> None:
        """See LoopBuffers."""
        floats = self._buffers.moved(self._buffers.floats)
        others = self._buffers.changed_others() if share.count else ()
        of_all = self._world.allgather((self._checksum(floats), others, floats, share.count))
        if any(one[:2] != of_all[0][:2] for one in of_all):
            self.begin(share)
            self.send()
            changed = {name for one in of_all if one[3] for name in one[2]} - {*self._moving}
            self.end(sorted(changed), [one[1] for one in of_all if one[3]])

    def _exchange(self, names: Sequence[str]) -> collectives.Handle[Array] | None:
        if not names:
            return None
        share = self._share
        flat = torch.cat([self._buffers.tensor(name).reshape(-1).double() for name in names])
        # Do not multiply by 0, because NaN times 0 is NaN.
        flat = flat * (share.count / share.total) if share.count else torch.zeros_like(flat)
        return collectives.allreduce(self._world, flat.numpy())

    def _take(self, names: Sequence[str], begun: collectives.Handle[Array] | None) -> None:
        if begun is None:
            return
        flat = torch.from_numpy(begun.wait())
        for name in names:
            tensor = self._buffers.tensor(name)
            values, flat = flat[: tensor.numel()], flat[tensor.numel() :]
            tensor.copy_(values.reshape(tensor.shape))


class OwnBuffers(LoopBuffers):
    """A floating buffer is this rank's own until an outer step, where it becomes the mean over the ranks. A buffer of
    another dtype is the same on all ranks after every backward pass, as without rounds."""

    def changed(self) -> tuple[tuple[str, ...], Values]:
        """See LoopBuffers. Changes without samples do not count."""
        if not self._share.count:
            self._buffers.put_back()
        return super().changed()

    def end(self, changed: Sequence[str], others: Sequence[Values]) -> None:
        """See LoopBuffers."""
        self._buffers.keep(self._buffers.floats)
        super().end(changed, others)

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


class ChangedBuffers(LoopBuffers):
    """Each virtual rank begins with the same buffers. The changes of floating buffers are exchanged with the gradients,
    the values of the others with the remarks of a step. Changes outside of virtual batches are warned of: see
    mpitrain/torch/norm_layers.py."""

    def __init__(self, buffers: ModuleBuffers, dtype: torch.dtype) -> None:
        """`dtype` is that of the changes."""
        super().__init__(buffers)
        self._dtype = dtype
        self.layout = buffers.layout(dtype)

    def begin_pass(self) -> None:
        """Begin a pass of a virtual rank."""
        self._buffers.keep_all()

    def floats(self) -> Iterator[numpy.ndarray]:
        """Yield the changes of the floating buffers since `begin_pass`, in the order of `layout`."""
        return self._buffers.changes(self._dtype, 1)

    def put_back(self) -> None:
        """Undo the changes since `begin_pass`."""
        self._buffers.put_back()

    def add(self, changes: Sequence[numpy.ndarray]) -> None:
        """Add the means of the changes to the floating buffers, in the order of `layout`."""
        self._buffers.add(dict(zip(self._buffers.floats, changes, strict=True)))
