"""Two PyTorch modules, their optimizers, and the parts that train them under the Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.nn.functional import cross_entropy

from mpitrain import Accumulate, Hook, Parts, ShardedSync, StopAtStep, Sync, TorchModule, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.optim import warmup_cosine
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.scattered import ScatteredExchange
from mpitrain.state.names import split
from mpitrain.strategies import Strategy

INPUTS, CLASSES, SEED = 6, 3, 3
COUNT, GLOBAL_BATCH, STEPS = 71, 23, 9  # the last batch has 2 samples, fewer than 3 or more ranks


class Net(torch.nn.Module):
    """A module with a frozen layer, two layers that share a weight, an unused parameter and constant buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(INPUTS, 5)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.one = torch.nn.Linear(5, 5, bias=False)
        self.two = torch.nn.Linear(5, 5, bias=False)
        self.two.weight = self.one.weight
        self.spare = torch.nn.Parameter(torch.ones(2))
        self.last = torch.nn.Linear(5, CLASSES)
        self.register_buffer("deviation", torch.tensor(1 / 3))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.first(x / self.deviation)))
        return self.last(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Normed(torch.nn.Module):
    """Batch norm is over samples and places, so one sample is enough. Its counter is an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(1, 4, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4 * INPUTS, CLASSES)
        self.register_buffer("called", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.called.fill_(True)
        return self.last(torch.relu(self.norm(self.convolution(x[:, None]))).flatten(1))


def mean_loss(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return cross_entropy(module(x), y)


def samples(dtype: str = "float64") -> tuple[numpy.ndarray, numpy.ndarray]:
    rng = numpy.random.default_rng(7)
    x = rng.standard_normal((COUNT, INPUTS))
    return x.astype(dtype), (x @ rng.standard_normal((INPUTS, CLASSES))).argmax(axis=1)


def made(kind: type[torch.nn.Module], dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind().to(dtype)


def sgd(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """SGD with weight decay on one of two groups, and a rate that is a function of the step."""
    trained = [its for its in module.parameters() if its.requires_grad]
    groups = [
        {"params": [its for its in trained if its.ndim > 1], "weight_decay": 0.01},
        {"params": [its for its in trained if its.ndim < 2]},
    ]
    schedule = warmup_cosine(0.3, warmup_steps=3, total_steps=20)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True), {"schedule": schedule}


def adam(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """AdamW with clipping, and a scheduler of PyTorch that changes the momentum too."""
    optimizer = torch.optim.AdamW([its for its in module.parameters() if its.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
    return optimizer, {"schedule": schedule, "clip_norm": 0.5}


def builder(
    kind: type[torch.nn.Module],
    optimizer: Callable[[torch.nn.Module], tuple[torch.optim.Optimizer, dict[str, Any]]],
    *,
    dtype: torch.dtype = torch.float64,
    most: int | None = None,
    **options: Any,
) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        module = made(kind, dtype, seed=1 + world.rank)  # the other ranks get the parameters of rank 0
        made_optimizer, more = optimizer(module)
        adapter: Any = TorchModule(module, mean_loss, made_optimizer, **{**more, **options})
        if most:
            adapter = Accumulate(adapter, per_rank_batch=most)
        data = samples(str(dtype).removeprefix("torch."))
        return Parts(adapter, Sync(), ArrayData(world, data, global_batch=GLOBAL_BATCH, seed=SEED))

    return build


def bits(trainer: Trainer) -> dict[str, bytes]:
    """Everything that a checkpoint keeps."""
    return {
        name: value.tobytes() if isinstance(value, numpy.ndarray) else repr(value).encode()
        for part in split(trainer.state())
        for name, value in part.items()
    }


# -- trainings with an optimizer that is divided between the ranks, or that is not ---------------------------

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
