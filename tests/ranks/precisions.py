"""A model whose gradients the tests of mixed precision choose, and its trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy

from mpitrain import ArrayFunction, Parts, Sync, Trainer, World
from mpitrain.optim import LossScale

NARROW = {"bf16": numpy.dtype(ml_dtypes.bfloat16), "fp16": numpy.dtype(numpy.float16)}
FLOAT32 = numpy.dtype(numpy.float32)
# Rank r has r + 1 samples in every step, so the ranks have different weights.
GRADIENTS = numpy.array([1.0, -2.0, 0.25])


class Samples:
    """A source of batches that differ in nothing but their weight on this rank."""

    def __init__(self, weight: int) -> None:
        self.steps_per_epoch, self.epoch, self._weight = 1, 0, weight

    def __next__(self) -> tuple[Any, int]:
        return numpy.ones(3, FLOAT32), self._weight

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return self

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class Given:
    """A model whose gradient of `w` is `gradients` + rank / 4, in the precision; `bad` is handed in at `bad_steps`."""

    def __init__(self, rank: int, dtype: numpy.dtype, bad: float = numpy.inf, bad_steps: tuple[int, ...] = ()) -> None:
        self.rank, self.dtype, self.bad, self.bad_steps = rank, dtype, bad, bad_steps
        self.scales: list[float | None] = []
        self.seen: list[numpy.ndarray] = []

    def __call__(
        self,
        parameters: dict[str, numpy.ndarray],
        batch: numpy.ndarray,
        on_gradient: Callable[[str, numpy.ndarray], None],
        loss_scale: float | None = None,
    ) -> float:
        assert parameters["w"].dtype == parameters["b"].dtype == batch.dtype == self.dtype
        self.scales.append(loss_scale)
        self.seen.append(parameters["w"].copy())
        gradient = (GRADIENTS + self.rank / 4) * (loss_scale or 1)
        if len(self.scales) in self.bad_steps:
            gradient[1] = self.bad
        with numpy.errstate(over="ignore"):
            on_gradient("w", gradient.astype(self.dtype))
            on_gradient("b", numpy.full((2, 2), loss_scale or 1, numpy.float32))  # a gradient may also be in float32
        return float(len(self.scales))


def trainer_of(
    world: World,
    function: Callable[..., float],
    precision: str,
    optimizer: Any,
    *,
    weight: int | None = None,
    loss_scale: LossScale | None = None,
) -> Trainer:
    """A trainer in this precision. `weight` is that of this rank; the default is rank + 1."""
    parameters = {"w": numpy.ones(3, FLOAT32), "b": numpy.zeros((2, 2), FLOAT32)}

    def build(world: World) -> Parts:
        adapter = ArrayFunction(function, parameters, optimizer, precision=precision, loss_scale=loss_scale)
        return Parts(adapter, Sync(), Samples(world.rank + 1 if weight is None else weight))

    return Trainer(build)
