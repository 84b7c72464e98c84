"""The buffers of a model that `prepare` has seen, kept equal on all ranks: see mpitrain/adapters/torch_buffers.py.

The means of floating buffers are summed in float64 and rounded once, so a buffer of 32 bits or fewer that is equal on
all ranks stays as it is. Known to change are those of the norm layers, whose kernels leave no trace: they travel while
the backward pass runs. Of the others it is seen when they have changed; from then on they travel too. A table that
never changes is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain import collectives
from mpitrain.adapters.torch_buffers import ModuleBuffers, Values
from mpitrain.arrays import Array
from mpitrain.torch.sharded import Share
from mpitrain.world import World


class BufferMeans:
    """Those of one model. Each step: `begin`, `changed`, `end`."""

    def __init__(self, world: World, model: torch.nn.Module) -> None:
        self._world = world
        self._buffers = ModuleBuffers(model)
        self._moving = self._buffers.moved(self._buffers.floats)
        self._share = Share(1, 1)
        self._begun: collectives.Handle[Array] | None = None

    def begin(self, share: Share) -> None:
        """Begin to exchange those that are known to change. Does not wait."""
        self._share = share
        self._begun = self._exchange(self._moving)

    def changed(self) -> tuple[tuple[str, ...], Values]:
        """Floating ones that have been seen to change and are not exchanged yet; and what this rank has made of others.

        Not collective.
        """
        still = [name for name in self._buffers.floats if name not in self._moving]
        return tuple(self._buffers.moved(still)), self._buffers.changed_others()

    def end(self, changed: Sequence[str], others: Sequence[Values]) -> None:
        """All are equal on all ranks when this returns.

        Args:
            changed: names that some rank has seen to change. They are exchanged at once, and in every step from now on.
            others: what the ranks have made of those that are not floating, in rank order.
        """
        self._take(self._moving, self._begun)
        self._begun = None
        self._take(changed, self._exchange(changed))
        self._moving = [*self._moving, *changed]
        # A rank without samples is not heard: what it alone has changed must not stay, and count in a later step.
        own = self._buffers.moved(name for name in self._buffers.floats if name not in self._moving)
        self._buffers.put_back(own)
        self._buffers.keep(own)
        self._buffers.settle_others(others)

    def _exchange(self, names: Sequence[str]) -> collectives.Handle[Array] | None:
        if not names:
            return None
        share = self._share
        flat = torch.cat([self._buffers.tensor(name).reshape(-1).double() for name in names])
        # Not multiplied by 0, which would leave NaN what it is.
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
