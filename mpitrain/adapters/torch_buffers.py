"""A module's buffers, such as the running means of batch norm: what a step changes in them is exchanged, as gradients.

Every rank sees other samples, so each one's forward pass changes them in its own way. The mean of the changes, weighted
by samples, is what all ranks put on top of the values of before: the same bits everywhere, in the buckets of the
gradients, without a message more. For a running mean that is exactly the one of the whole batch. A value that is never
changed stays as it is, to the bit, which a mean of the values themselves would round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.errors import ConfigError


class Buffers:
    """The buffers of a module that its `state_dict` has. Those with persistent=False are the module's own business.

    Attributes:
        names: of the buffers, in the module's order.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        """Changes are handed out in `dtype`. Raises ConfigError for a buffer of complex numbers."""
        kept = module.state_dict(keep_vars=True).keys()
        self.names = [name for name, _ in module.named_buffers() if name in kept]
        self._dtype = dtype
        self._owners = [(module.get_submodule(owner), its) for owner, _, its in (n.rpartition(".") for n in self.names)]
        for name, buffer in zip(self.names, self._now(), strict=True):
            if buffer.is_complex():
                raise ConfigError(
                    f"the buffer {name} is {buffer.dtype}; its changes have no mean here. If it never changes, "
                    "register it with persistent=False, else as two real ones"
                )
        self._before = [buffer.clone() for buffer in self._now()]

    def _now(self) -> list[torch.Tensor]:
        # By name: a module may put a new tensor into a buffer's place.
        return [getattr(owner, its).detach() for owner, its in self._owners]

    def arrays(self) -> dict[str, numpy.ndarray]:
        """By name, over the buffers' memory."""
        return {name: array_of(buffer) for name, buffer in zip(self.names, self._now(), strict=True)}

    def keep(self) -> None:
        """Remember the values of now."""
        for before, buffer in zip(self._before, self._now(), strict=True):
            before.copy_(buffer)

    def changes(self, scale: float) -> Iterator[numpy.ndarray]:
        """What has changed since `keep`, times `scale`, in the order of the names."""
        for before, buffer in zip(self._before, self._now(), strict=True):
            middle = self._exact(buffer)
            # Infinity that stays, as in a mask, is no change.
            change = torch.where(buffer == before, 0, buffer.to(middle) - before.to(middle)).to(self._dtype)
            yield array_of(change if scale == 1 else change * scale)

    def put_back(self) -> None:
        """Undo what has changed since `keep`."""
        for before, buffer in zip(self._before, self._now(), strict=True):
            buffer.copy_(before)

    def add(self, changes: Sequence[numpy.ndarray]) -> None:
        """Make these changes; integers and booleans by the nearest whole number."""
        for array, buffer in zip(changes, self._now(), strict=True):
            change, middle = tensor_of(array), self._exact(buffer)
            if not buffer.is_floating_point():
                change = change.round()
            buffer.copy_(buffer.to(middle) + change.to(middle))

    def _exact(self, buffer: torch.Tensor) -> torch.dtype:
        """In which a buffer's values and their differences are computed."""
        return torch.promote_types(buffer.dtype, self._dtype) if buffer.is_floating_point() else torch.int64
