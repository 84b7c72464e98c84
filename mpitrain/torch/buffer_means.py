"""Keep the buffers of a prepared model equal on all ranks; see mpitrain/adapters/torch_buffers.py.

The means of floating buffers are summed in float64 and rounded once, so a buffer of 32 bits or fewer that is equal on
all ranks stays as it is. The buffers of norm layers are known to change, because their kernels leave no trace. They are
exchanged while the backward pass runs. For other buffers, a change is detected; from then on they are exchanged too. A
table that never changes is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain import collectives
from mpitrain.adapters.torch_buffers import ModuleBuffers, Values
from mpitrain.arrays import Array
from mpitrain.torch.drawn import Share
from mpitrain.world import World


class BufferMeans:
    """The buffer means of one model. Each step calls `begin`, `changed`, `end`."""

    def __init__(self, world: World, model: torch.nn.Module) -> None:
        self._world = world
        self._buffers = ModuleBuffers(model)
        self._moving = self._buffers.moved(self._buffers.floats)
        self._share = Share(1, 1)
        self._begun: collectives.Handle[Array] | None = None

    def begin(self, share: Share) -> None:
        """Begin to exchange the buffers that are known to change. Do not wait."""
        self._share = share
        self._begun = self._exchange(self._moving)

    def changed(self) -> tuple[tuple[str, ...], Values]:
        """Return newly changed floating buffers, which are not exchanged yet, and this rank's values of the others.

        Not collective.
        """
        still = [name for name in self._buffers.floats if name not in self._moving]
        return tuple(self._buffers.moved(still)), self._buffers.changed_others()

    def end(self, changed: Sequence[str], others: Sequence[Values]) -> None:
        """Make all buffers equal on all ranks before returning.

        Args:
            changed: names of buffers that some rank has seen to change. They are exchanged now, and in every later
                step.
            others: the ranks' values of buffers that are not floating, in rank order.
        """
        self._take(self._moving, self._begun)
        self._begun = None
        self._take(changed, self._exchange(changed))
        self._moving = [*self._moving, *changed]
        # A rank without samples does not count. What only it has changed must not stay and count in a later step.
        own = self._buffers.moved(name for name in self._buffers.floats if name not in self._moving)
        self._buffers.put_back(own)
        self._buffers.keep(own)
        self._buffers.settle_others(others)

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
