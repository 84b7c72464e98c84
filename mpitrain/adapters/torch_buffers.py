"""A module's buffers, such as the running statistics of batch norm: one rule for TorchModule and prepare.

- A buffer in the module's `state_dict` is the same on all ranks after every step. A buffer with persistent=False is
  left to the module: scratch memory, a cache, a hidden state of this rank's samples.
- A floating buffer becomes the mean, weighted by samples, of the values after each rank's forward passes. For a running
  mean, this is the running mean of the whole batch.
- A buffer of another dtype, such as a counter, gets the bits of the first rank with samples. If all ranks have changed
  it in the same way in a step, as is usual, nothing is sent for it.
- A rank without samples does not count. A buffer that no rank changes keeps its bits.

TorchModule exchanges the changes of floating buffers in the buckets of the gradients. prepare exchanges their values in
float64 (mpitrain/torch/loop_buffers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias
from weakref import ref

import numpy
import torch
from torch.nn.modules.batchnorm import _NormBase

from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.reducer.bucket import Parameter

# The bytes of the changed buffers that are not floating, by name.
Values: TypeAlias = tuple[tuple[str, bytes], ...]


class ModuleBuffers:
    """The buffers in a module's `state_dict`. This object does not keep the module alive.

    Attributes:
        floats: the names of floating buffers, in the module's order.
        others: the names of the other buffers.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Start to notice changes."""
        kept = module.state_dict(keep_vars=True).keys()
        self._owners = {}
        for name in (name for name, _ in module.named_buffers() if name in kept):
            path, _, own = name.rpartition(".")
            self._owners[name] = ref(module.get_submodule(path)), own
        self.floats = [name for name in self._owners if self.tensor(name).is_floating_point()]
        self.others = [name for name in self._owners if name not in self.floats]
        self._before: dict[str, torch.Tensor] = {}
        # Keep the buffer and its memory too. While they are kept, no other tensor can have their addresses.
        self._versions: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.keep(self._owners)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the current buffer of this name. A module may replace a buffer with a new tensor.

        This goes through `data`, as the kernels of norm layers do, so that a kept graph can be used again.
        """
        module, own = self._owners[name]
        buffer: torch.Tensor = getattr(module(), own)
        return buffer.data

    def layout(self, dtype: torch.dtype | None = None) -> list[Parameter]:
        """Return the descriptions for a reducer of the floating buffers, or of their changes in `dtype`."""
        tensors = {name: self.tensor(name) for name in self.floats}
        kinds = {name: array_of(torch.empty(0, dtype=dtype or one.dtype)).dtype for name, one in tensors.items()}
        return [Parameter(name, tuple(one.shape), kinds[name]) for name, one in tensors.items()]

    def arrays(self) -> dict[str, numpy.ndarray]:
        """Return arrays over the buffers' memory, by name."""
        return {name: array_of(self.tensor(name)) for name in self._owners}

    def keep(self, names: Iterable[str]) -> None:
        """Remember the current values of these buffers."""
        for name in names:
            tensor = self.tensor(name)
            before = self._before.get(name)
            # Copy even if no change was noticed: loading a checkpoint goes through NumPy, which leaves no trace.
            if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
                self._before[name] = tensor.clone()
            else:
                before.copy_(tensor)
            self._versions[name] = self._version(name)

    def keep_all(self) -> None:
        """Remember the current values of all buffers, when a pass begins or after they were loaded."""
        self.keep(self._owners)

    def moved(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that may have changed since `keep`."""
        return [name for name in names if self._has_moved(name)]

    def put_back(self, names: Iterable[str] | None = None) -> None:
        """Undo the changes since `keep`, of these buffers or of all."""
        for name in self.moved(self._owners if names is None else names):
            self.tensor(name).copy_(self._before[name])

    def changes(self, dtype: torch.dtype, scale: float) -> Iterator[numpy.ndarray]:
        """Yield the changes of the floating buffers since `keep`, times `scale`, in `dtype`."""
        for name in self.floats:
            tensor, before = self.tensor(name), self._before[name]
            if not self._has_moved(name):
                yield numpy.zeros(tuple(tensor.shape), array_of(torch.empty(0, dtype=dtype)).dtype)
                continue
            wide = torch.promote_types(tensor.dtype, dtype)
            # An infinity that stays infinite, as in a mask, is not a change.
            same = (tensor == before) | (tensor.isnan() & before.isnan())
            change = torch.where(same, 0, tensor.to(wide) - before.to(wide)).to(dtype)
            yield array_of(change if scale == 1 else change * scale)

    def add(self, changes: Mapping[str, numpy.ndarray]) -> None:
        """Add these changes, as `changes` yields them, to floating buffers, by name."""
        for name, array in changes.items():
            tensor, change = self.tensor(name), tensor_of(array)
            wide = torch.promote_types(tensor.dtype, change.dtype)
            tensor.copy_(torch.where(change == 0, tensor.to(wide), tensor.to(wide) + change.to(wide)))

    def changed_others(self) -> Values:
        """Return the buffers that are not floating and have changed since `keep`."""
        moved = (name for name in self.moved(self.others) if not torch.equal(self.tensor(name), self._before[name]))
        return tuple((name, self.tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes()) for name in moved)

    def fits_others(self, values: object) -> bool:
        """Whether another process could have returned these values from `changed_others`."""
        if not isinstance(values, tuple):
            return False
        for value in values:
            if not isinstance(value, tuple) or len(value) != 2 or value[0] not in self.others:
                return False
            tensor = self.tensor(value[0])
            if not isinstance(value[1], bytes) or len(value[1]) != tensor.numel() * tensor.element_size():
                return False
        return True

    def settle_others(self, of_ranks: Sequence[Values]) -> None:
        """Set the buffers that are not floating to the first of these values. Undo changes that are not in it."""
        values = dict(of_ranks[0]) if of_ranks else {}
        for name in self.others:
            tensor = self.tensor(name)
            if name in values:
                tensor.copy_(torch.frombuffer(bytearray(values[name]), dtype=tensor.dtype).view(tensor.shape))
            elif self._has_moved(name):
                tensor.copy_(self._before[name])
        self.keep(self.others)

    def _has_moved(self, name: str) -> bool:
        # The kernels of norm layers leave no trace.
        if isinstance(self._owners[name][0](), _NormBase):
            return True
        buffer, memory, version = self._version(name)
        kept, kept_memory, kept_version = self._versions[name]
        return buffer is not kept or memory.data_ptr() != kept_memory.data_ptr() or version != kept_version

    def _version(self, name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the buffer, its memory, and a number that differs after each change by PyTorch.

        A module may replace a buffer with a new tensor, or give the buffer new memory.
        """
        module, own = self._owners[name]
        buffer: torch.Tensor = getattr(module(), own)
        return buffer, buffer.data, buffer._version
