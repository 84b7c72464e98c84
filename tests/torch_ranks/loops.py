"""What the tests of rounds share: a loop of a user's own, and the same training by replicas of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch.nn.functional import cross_entropy

import mpitrain.torch
from mpitrain import DiLoCo, LocalSGD, Parts, StreamingDiLoCo, World
from mpitrain.optim import SGD
from mpitrain.strategies import Strategy
from mpitrain.world.shard import part_of

from .test_torch_module import batches
from .torch_modules import Net, builder, made, samples, sgd

EVERY, STEPS = 3, 8


OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "local_sgd": lambda: LocalSGD(EVERY),
    "diloco": lambda: DiLoCo(EVERY, outer=SGD(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)),
    "streaming_diloco": lambda: StreamingDiLoCo(EVERY, fragments=4, delay=2),
}


def build(strategy: str, kind: Any, optimizer: Any) -> Callable[[World], Parts]:
    return lambda world: replace(builder(kind, optimizer)(world), strategy=STRATEGIES[strategy]())


class Replica:
    """What one rank trains."""

    def __init__(self, kind: Any) -> None:
        self.module = made(kind)
        self.optimizer, options = sgd(self.module)
        self.schedule = options["schedule"]
        self.count = 0

    def step(self, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        if len(x):
            cross_entropy(self.module(x), y).backward()
        else:
            for name, its in self.module.named_parameters():
                its.grad = torch.zeros_like(its) if its.requires_grad and name != "spare" else None
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(step)
        self.optimizer.step()
        self.count += len(x)

    def floats(self) -> dict[str, torch.Tensor]:
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: its.data for name, its in named if its.is_floating_point()}


def by_hand(kind: Any, size: int, is_mean: bool) -> dict[str, numpy.ndarray]:
    replicas = [Replica(kind) for _ in range(size)]
    trained = {name for name, its in replicas[0].module.named_parameters() if its.requires_grad}
    common = copy.deepcopy(replicas[0].floats())
    speed = {name: torch.zeros_like(its) for name, its in common.items()}
    x, y = (torch.from_numpy(its) for its in samples())
    for step, chosen in zip(range(STEPS), batches(), strict=False):
        for rank, replica in enumerate(replicas):
            mine = chosen[part_of(len(chosen), rank, size)]
            replica.step(step, x[mine], y[mine])
        if (step + 1) % EVERY and step + 1 < STEPS:
            continue
        total = sum(replica.count for replica in replicas)
        for name, its in common.items():
            if torch.isinf(its).any():  # the mask is the same on all ranks
                continue
            gone = sum((its - replica.floats()[name]) * (replica.count / total) for replica in replicas)
            if name in trained and not is_mean:
                speed[name] = OUTER_MOMENTUM * speed[name] + gone
                its.sub_(OUTER_RATE * (gone + OUTER_MOMENTUM * speed[name]))
            else:
                its.sub_(gone)
        for replica in replicas:
            replica.count = 0
            for name, its in replica.floats().items():
                its.copy_(common[name])
    return {name: its.numpy() for name, its in common.items()}


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
