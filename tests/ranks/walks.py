"""A model that goes where a test says, for tests of SparseLoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from mpitrain import ArrayFunction, SparseLoCo
from mpitrain.optim import SGD
from mpitrain.strategies import Strategy

EVERY = 2
# Samples of each rank in a step. Their sums are powers of two, so all shares are exact.
SAMPLES = [1, 3, 4, 8, 16, 32, 64]


class Walk:
    """A model that goes a given distance in a round, in equal steps: its gradient is what the caller says."""

    def __init__(self, **widths: int) -> None:
        self.gradients = {name: numpy.zeros(width, numpy.float32) for name, width in widths.items()}
        parameters = {name: value.copy() for name, value in self.gradients.items()}
        self.model = ArrayFunction(self, parameters, SGD(1.0))

    def __call__(self, _: Any, __: Any, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
        for name, gradient in self.gradients.items():
            on_gradient(name, gradient)
        return 0.0

    def __getitem__(self, name: str) -> numpy.ndarray:
        value: numpy.ndarray = self.model.parameters()[name]
        return value

    def step(self, strategy: Strategy, samples: int, **distances: Any) -> None:
        for name, distance in distances.items():
            self.gradients[name] = numpy.asarray(distance, numpy.float32) / numpy.float32(EVERY)
        strategy.begin_step(samples)
        strategy.finish_step(self.model, self.model.loss_and_gradients(None, strategy.on_gradient))

    def round(self, strategy: Strategy, samples: int, **distances: Any) -> None:
        for _ in range(EVERY):
            self.step(strategy, samples, **distances)


def kept(strategy: SparseLoCo, name: str = "w") -> numpy.ndarray:
    """What this rank has not sent."""
    value: numpy.ndarray = strategy.own_state()["residual"][f"round/0/left out/{name}"]
    return value


def shares(size: int) -> list[float]:
    return [count / sum(SAMPLES[:size]) for count in SAMPLES[:size]]
