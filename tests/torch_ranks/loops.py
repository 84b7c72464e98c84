"""A loop of a user's own, for tests of prepare() in rounds."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

import mpitrain.torch
from mpitrain import World
from mpitrain.strategies import Strategy

from .test_rounds import STEPS
from .test_torch_module import batches
from .torch_modules import Net, made, samples, sgd


def data_of(steps: int) -> list[tuple[Any, Any]]:
    """The batches of all ranks together, those of the Trainer's first steps."""
    x, y = (torch.from_numpy(one) for one in samples())
    return [(x[chosen], y[chosen]) for _, chosen in zip(range(steps), batches(), strict=False)]


class Loop:
    """A loop of a user's own, as it is without us, with a schedule."""

    def __init__(
        self,
        world: World,
        strategy: Strategy | None,
        kind: Any = Net,
        optimizer: Any = sgd,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model = made(kind, dtype, seed=1 + world.rank)  # the other ranks get the parameters of rank 0
        self.optimizer, options = optimizer(self.model)
        self.schedule, self.number = options["schedule"], 0
        self.given, self.strategy = [(x.to(dtype), y) for x, y in data_of(STEPS)], strategy

    def prepare(self) -> Loop:
        self.model, self.optimizer, self.data = mpitrain.torch.prepare(
            self.model, self.optimizer, self.given, strategy=self.strategy
        )
        return self

    def run(self, last: int = STEPS) -> None:
        for number, (x, y) in enumerate(self.data):
            if self.number <= number < last:
                self.optimizer.zero_grad()
                cross_entropy(self.model(x), y).backward()
                self.step()

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(self.number)
        self.optimizer.step()
        self.number += 1

    def bits(self) -> list[bytes]:
        return [one.detach().numpy().tobytes() for one in self.model.parameters()]
