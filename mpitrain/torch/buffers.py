"""A model's buffers, such as the running statistics of BatchNorm, kept equal on all ranks.

Floating ones become the mean over ranks, weighted by samples: with it, running means of a first layer are those of one
process that has seen the whole batch. Others (counters) become rank 0's. The sums are made in float64 and rounded once,
so a buffer of 32 bits or fewer that is equal on all ranks stays as it is.

Known to change are those of the norm layers, whose kernels leave no trace. Of the others it is seen when they have
changed; from then on they are exchanged too. A table that never changes costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import numpy
import torch
from torch.nn.modules.batchnorm import _NormBase

from mpitrain import collectives
from mpitrain.arrays import Array
from mpitrain.torch.sharded import Share
from mpitrain.world import World


class Buffers:
    """Those of one model. Each step: `begin`, then `end` and, where some rank has found any, `add`."""

    def __init__(self, world: World, model: torch.nn.Module) -> None:
        self._world = world
        # Weak, for the model must not be kept by what belongs to it.
        self._owners = {
            f"{path}.{name}" if path else name: (ref(module), name)
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer is not None
        }
        self._moving = [name for name, (module, _) in self._owners.items() if isinstance(module(), _NormBase)]
        self._seen = {name: self._version(name) for name in self._owners if name not in self._moving}
        self._begun: list[tuple[list[str], collectives.Handle[Array]]] = []

    def begin(self, share: Share) -> None:
        """Begin to exchange those that are known to change. Does not wait."""
        self._begun = self._exchange(self._moving, share)

    def end(self) -> None:
        """They are equal on all ranks when this returns."""
        self._take(self._begun)
        self._begun = []

    def found(self) -> list[str]:
        """Names of those that have been seen to change, and are not exchanged yet. Not collective."""
        return [name for name, version in self._seen.items() if self._version(name) != version]

    def add(self, names: Iterable[str], share: Share) -> None:
        """From now on these are exchanged too, the first time at once; the same names on all ranks."""
        new = [name for name in self._owners if name in set(names) and name in self._seen]
        for name in new:
            del self._seen[name]
        self._moving += new
        self._take(self._exchange(new, share))

    def _exchange(self, names: list[str], share: Share) -> list[tuple[list[str], collectives.Handle[Array]]]:
        tensors = {name: self._get(name) for name in names}
        floats = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        others = [name for name in names if name not in floats]
        begun = []
        if floats:
            flat = torch.cat([tensors[name].reshape(-1).double() for name in floats])
            # Not multiplied by 0, which would leave NaN what it is.
            flat = flat * (share.count / share.total) if share.count else torch.zeros_like(flat)
            begun.append((floats, collectives.allreduce(self._world, flat.numpy())))
        if others:
            values = [tensors[name].contiguous().reshape(-1).view(torch.uint8) for name in others]
            bytes_ = torch.cat(values).numpy() * numpy.uint8(self._world.is_root)
            begun.append((others, collectives.allreduce(self._world, bytes_)))
        return begun

    def _take(self, begun: list[tuple[list[str], collectives.Handle[Array]]]) -> None:
        for names, handle in begun:
            flat = torch.from_numpy(handle.wait())
            for name in names:
                tensor = self._get(name)
                count = tensor.numel() if tensor.is_floating_point() else tensor.numel() * tensor.element_size()
                mine, flat = flat[:count], flat[count:]
                # The bytes are copied, for in the middle of others they may not lie as their dtype needs it.
                value = mine if tensor.is_floating_point() else mine.clone().view(tensor.dtype)
                # By `data`, as the norm layers' own kernels do it: a graph that is kept can be gone through again.
                tensor.data.copy_(value.reshape(tensor.shape))

    def _get(self, name: str) -> torch.Tensor:
        module, own = self._owners[name]
        buffer: torch.Tensor = getattr(module(), own)
        return buffer

    def _version(self, name: str) -> tuple[int, int]:
        """Another one after each change by PyTorch, and of another tensor in its place."""
        buffer = self._get(name)
        return buffer.data_ptr(), buffer._version
