"""Accumulate: gradient accumulation for a batch that is too large for the memory, piece by piece."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy

from mpitrain.adapters.adapter import Adapter, AdapterAround, OnGradient, seeded_of
from mpitrain.arrays import Array
from mpitrain.errors import ConfigError, GradientError
from mpitrain.tree import Tree, leaves, num_samples, rebuild
from mpitrain.world.shard import part_of
from mpitrain.world.world import World


class Accumulate(AdapterAround):
    """An Adapter that passes the model at most `per_rank_batch` samples at once, and adds up the gradients.

    The note of a step is that of the last piece. The number of pieces is not in the state.

    A step is still one step: the global batch, its mean, the schedule and the optimizer do not change. Gradients are
    exchanged once, while the model computes the last piece. The weight of a piece is its number of samples. While a
    batch has several pieces, one more copy of the gradients is in memory.
    """

    divides_as_inner = True

    def __init__(self, adapter: Adapter, *, per_rank_batch: int) -> None:
        """Not collective: `per_rank_batch` may differ between ranks: each may be as large as the rank's memory allows.

        Args:
            adapter: the model's Adapter. Batches are trees of arrays with the samples along the first dimension.
            per_rank_batch: the most samples that the model of this rank gets at once.

        Raises:
            ConfigError: `per_rank_batch` is below 1.
        """
        if not isinstance(per_rank_batch, int | numpy.integer) or isinstance(per_rank_batch, bool):
            raise ConfigError(f"Accumulate: per_rank_batch={per_rank_batch!r}; it must be an int")
        if per_rank_batch < 1:
            raise ConfigError(f"Accumulate: per_rank_batch={per_rank_batch}; it must be at least 1")
        self._adapter = adapter
        self._most = int(per_rank_batch)

    @property
    def _inner(self) -> Adapter:
        return self._adapter

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """See Adapter."""
        count = num_samples(batch)
        num_pieces = -(-count // self._most)
        if num_pieces < 2:
            return self._adapter.loss_and_gradients(batch, on_gradient)
        pieces = [part_of(count, number, num_pieces) for number in range(num_pieces)]
        sums: dict[int, Array] = {}
        counted = [0] * len(self.layout)  # by parameter: the number of pieces that have passed on its gradient
        loss = 0.0
        for part in pieces:
            share = (part.stop - part.start) / count
            here: set[int] = set()

            def add(index: int, gradient: Array | None, share: float = share, here: set[int] = here) -> None:
                parameter = self.layout[index]
                kind = getattr(gradient, "shape", None), getattr(gradient, "dtype", None)
                if gradient is not None and kind != (parameter.shape, parameter.dtype):
                    on_gradient(index, gradient)  # raises the error for it
                    return
                if index in here:
                    raise GradientError(f"the gradient of {parameter.name} was handed in twice for the same samples")
                here.add(index)
                counted[index] += 1
                if gradient is not None:
                    weighted = gradient * parameter.dtype.type(share)
                    if index in sums:
                        sums[index] += weighted
                    else:
                        sums[index] = weighted
                # If a gradient is missing for a piece, it is not passed on: it counts as missing, as without pieces.
                if counted[index] == num_pieces:
                    on_gradient(index, sums.pop(index, None))

            values = (leaf[part] for _, leaf in leaves(batch))
            loss += share * self._adapter.loss_and_gradients(rebuild(batch, values.__next__), add)
        return loss

    @property
    def num_buffers(self) -> int:
        """See Adapter.layout."""
        number: int = getattr(self._adapter, "num_buffers", 0)
        return number

    def check_note(self, note: Any) -> None:
        """See Adapter.note."""
        adapter: Any = self._adapter
        if hasattr(adapter, "check_note"):
            adapter.check_note(note)

    def seeded(self, key: tuple[int, ...]) -> AbstractContextManager[None]:
        """See SeededAdapter.

        Raises:
            ConfigError: the adapter has no random numbers for virtual ranks.
        """
        return seeded_of(self._adapter).seeded(key)

    def count_steps(self, world: World) -> Any:
        """Return the object that notes the adapter's steps, as TorchModule does; None: the adapter cannot note them."""
        count_steps = getattr(self._adapter, "count_steps", None)
        return count_steps and count_steps(world)
