"""Accumulate: gradients of a batch that is too large for the memory, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy

from mpitrain.adapters.adapter import Adapter, OnGradient, OptimizerShard, divided_of, scaled_of, seeded_of, sharded_of
from mpitrain.arrays import Array
from mpitrain.errors import ConfigError, GradientError
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.division import Division
from mpitrain.exchange.owned import Owned
from mpitrain.exchange.remarks import Remarks
from mpitrain.shard import part_of
from mpitrain.training.loss_scale import LossScale
from mpitrain.tree import Tree, leaves, num_samples, rebuild


class Accumulate:
    """An Adapter that gives the model at most `per_rank_batch` samples at once, and adds up the gradients.

    A step is still one step: the global batch, its mean, the schedule and the optimizer do not change. Gradients are
    exchanged once, while the model computes the last piece. The weight of a piece is its number of samples. While a
    batch has several pieces, one more copy of the gradients is in memory.
    """

    def __init__(self, adapter: Adapter, *, per_rank_batch: int) -> None:
        """Not collective: ranks may have different `per_rank_batch`, each as large as its memory allows.

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
    def layout(self) -> Sequence[Parameter]:
        """See Adapter."""
        return self._adapter.layout

    @property
    def loss_scale(self) -> LossScale | None:
        """See Adapter."""
        return self._adapter.loss_scale

    @property
    def precision(self) -> numpy.dtype:
        """See Adapter."""
        return self._adapter.precision

    def parameters(self) -> dict[str, Array]:
        """See Adapter."""
        return self._adapter.parameters()

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See Adapter."""
        self._adapter.load_parameters(values)

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """See Adapter."""
        count = num_samples(batch)
        num_pieces = -(-count // self._most)
        if num_pieces < 2:
            return self._adapter.loss_and_gradients(batch, on_gradient)
        pieces = [part_of(count, number, num_pieces) for number in range(num_pieces)]
        sums: dict[int, Array] = {}
        counted = [0] * len(self.layout)  # by parameter: the number of pieces that have handed in its gradient
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
                # A gradient that is missing for a piece is not handed in: it counts as missing, as without pieces.
                if counted[index] == num_pieces:
                    on_gradient(index, sums.pop(index, None))

            values = (leaf[part] for _, leaf in leaves(batch))
            loss += share * self._adapter.loss_and_gradients(rebuild(batch, values.__next__), add)
        return loss

    def note(self) -> Any:
        """See Adapter. The note is that of the last piece."""
        return self._adapter.note()

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

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array], remarks: Remarks) -> float:
        """See Adapter."""
        return self._adapter.apply_gradients(flats, remarks)

    def scale_next_rate(self, factor: float) -> None:
        """See ArrayFunction.

        Raises:
            ConfigError: the adapter cannot scale the learning rate of one step.
        """
        scaled_of(self._adapter).scale_next_rate(factor)

    def seeded(self, key: tuple[int, ...]) -> AbstractContextManager[None]:
        """See SeededAdapter.

        Raises:
            ConfigError: the adapter has no random numbers for virtual ranks.
        """
        return seeded_of(self._adapter).seeded(key)

    def divisions(self, num_servers: int) -> tuple[Division, Division]:
        """See DividedAdapter.

        Raises:
            ConfigError: the adapter cannot be divided.
        """
        return divided_of(self._adapter).divisions(num_servers)

    def dividable_optimizer(self) -> str:
        """See DividedAdapter.

        Raises:
            ConfigError: the adapter or its optimizer cannot be divided.
        """
        return divided_of(self._adapter).dividable_optimizer()

    def update_only(self, number: int, num_servers: int, norm_of_all: Callable[[float], float]) -> None:
        """See DividedAdapter.

        Raises:
            ConfigError: the adapter or its optimizer cannot update a part.
        """
        divided_of(self._adapter).update_only(number, num_servers, norm_of_all)

    def plan_update(self) -> dict[str, Any]:
        """See DividedAdapter."""
        return divided_of(self._adapter).plan_update()

    def follow_plan(self, plan: Mapping[str, Any]) -> None:
        """See DividedAdapter."""
        divided_of(self._adapter).follow_plan(plan)

    def part_state(self, number: int) -> dict[str, Any]:
        """See DividedAdapter."""
        return divided_of(self._adapter).part_state(number)

    def take_part_state(self, number: int, state: Mapping[str, Any], gone: Sequence[str]) -> None:
        """See DividedAdapter."""
        divided_of(self._adapter).take_part_state(number, state, gone)

    def shard(self, owned: Owned, norm_of_all: Callable[[float], float]) -> OptimizerShard:
        """See ShardedAdapter.

        Raises:
            ConfigError: the adapter or its optimizer cannot be divided.
        """
        return sharded_of(self._adapter).shard(owned, norm_of_all)

    def measure_gradient_norm(self) -> None:
        """See Adapter."""
        self._adapter.measure_gradient_norm()

    def gradient_norm(self) -> float | None:
        """See Adapter."""
        return self._adapter.gradient_norm()

    def state(self) -> dict[str, Any]:
        """See Adapter. The state does not hold the number of pieces."""
        return self._adapter.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Adapter."""
        self._adapter.restore(state)
