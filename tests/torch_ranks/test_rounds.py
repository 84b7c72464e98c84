"""Rounds of a PyTorch module, against replicas in PyTorch alone: momentum buffers, running means, resumes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

from mpitrain import Checkpoint, DiLoCo, LocalSGD, Parts, StopAtStep, StreamingDiLoCo, Trainer, World
from mpitrain.optim import SGD
from mpitrain.strategies import Strategy
from mpitrain.world.shard import part_of
from tests.ranks.common import assert_same_bits
from tests.ranks.test_rounds_resumed import forget_last

from .test_torch_module import batches
from .torch_modules import Net, Normed, adam, bits, builder, made, samples, sgd

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


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Net has a parameter that no loss depends on, and a line says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
@pytest.mark.parametrize("kind", [Net, Normed])
def test_the_replicas_of_pytorch(world: World, kind: Any, strategy: str) -> None:
    trainer = Trainer(build(strategy, kind, sgd), [StopAtStep(STEPS)])
    trainer.run()
    expected = by_hand(kind, world.size, strategy == "local_sgd")
    found = trainer.adapter.parameters()
    for name, value in expected.items():
        if name in found:
            numpy.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)
    assert expected.keys() & found.keys() >= {name for name, its in made(kind).named_parameters() if its.requires_grad}
    assert_same_bits(world, *found.values())
    trainer.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("kind", "optimizer"), [(Normed, sgd), (Net, adam)])
def test_a_resume_within_a_round(world: World, shared: Path, kind: Any, optimizer: Any, strategy: str) -> None:
    """Bit for bit: each rank has its momentum again."""
    make = build(strategy, kind, optimizer)
    whole = Trainer(make, [StopAtStep(9)])
    whole.run()
    Trainer(make, [StopAtStep(7), Checkpoint(shared, steps=5)]).run()
    forget_last(world, shared, 7)
    resumed = Trainer(make, [StopAtStep(9), Checkpoint(shared, steps=100)])
    resumed.run()
    assert bits(resumed) == bits(whole)
    for trainer in (whole, resumed):
        trainer.close()
