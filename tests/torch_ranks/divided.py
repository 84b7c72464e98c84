"""Trainings of a PyTorch module with an optimizer that is divided between the ranks, or that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpitrain import Hook, Parts, ShardedSync, StopAtStep, Sync, Trainer, World
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.scattered import ScatteredExchange
from mpitrain.strategies import Strategy

from .torch_modules import bits, builder

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "sync": lambda: Sync(lambda world: make_exchange(world, "ring")),
    "sharded": lambda: ShardedSync(lambda world: ScatteredExchange(world, "ring")),
}


def run(strategy: str, kind: Any, optimizer: Any, steps: int, *hooks: Hook, **options: Any) -> Trainer:
    def build(world: World) -> Parts:
        parts = builder(kind, optimizer, **options)(world)
        return Parts(parts.adapter, STRATEGIES[strategy](), parts.data)

    trainer = Trainer(build, [*hooks, StopAtStep(steps)])
    trainer.run()
    trainer.own_state()
    return trainer


def assert_alike(found: Trainer, expected: Trainer) -> None:
    assert bits(found) == bits(expected)
    found.close()
    expected.close()


def of(name: str, **options: Any) -> Callable[[Any], Any]:
    """An optimizer of torch.optim with its defaults, at one rate."""

    def make(module: Any) -> Any:
        trained = [its for its in module.parameters() if its.requires_grad]
        return getattr(torch.optim, name)(trained, lr=0.01, **options), {"schedule": None}

    return make
