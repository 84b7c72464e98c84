"""The rules for a TorchModule under every strategy of the registry, beside tests/ranks/test_strategies.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mpitrain import ArrayFunction, Checkpoint, Parts, SparseLoCo, StopAtStep, TorchModule, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.errors import ConfigError, NonFiniteError
from mpitrain.optim import SGD, warmup_cosine
from mpitrain.strategies import STRATEGIES, ServedStrategy, Strategy, make_strategy
from tests.ranks.common import assert_same_bits, error_on_all
from tests.ranks.test_rounds_resumed import forget_last
from tests.ranks.test_strategies import CODED, as_sync

from .test_torch_module import Record, bare_torch
from .torch_modules import STEPS, Net, adam, bits, builder, made, mean_loss

pytestmark = pytest.mark.filterwarnings("ignore:.*spare")


def sgd_of(momentum: float) -> Callable[[torch.nn.Module], tuple[torch.optim.Optimizer, dict[str, Any]]]:
    def make(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        trained = [its for its in module.parameters() if its.requires_grad]
        schedule = warmup_cosine(0.3, warmup_steps=3, total_steps=20)
        return torch.optim.SGD(trained, lr=0.1, momentum=momentum, weight_decay=0.01), {"schedule": schedule}

    return make


def parts(make: Callable[[], Strategy], optimizer: Any) -> Callable[[World], Parts]:
    return lambda world: replace(builder(Net, optimizer)(world), strategy=make())


def means_are_by_samples(world: World, name: str, _: Path) -> None:
    """Batches that no number of ranks divides, and ranks without samples: as PyTorch alone in one process."""
    momentum = as_sync(name)[1]
    record = Record()
    trainer = Trainer(parts(lambda: as_sync(name)[0], sgd_of(momentum)), [StopAtStep(STEPS), record])
    trainer.run()
    expected, losses, rates = bare_torch(Net, sgd_of(momentum), 1)
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-11)
    numpy.testing.assert_allclose([step.learning_rate for step in record.steps], rates, rtol=1e-15)
    found = trainer.adapter.parameters()
    for key, value in found.items():
        numpy.testing.assert_allclose(value, expected[key], rtol=1e-10, atol=1e-12, err_msg=key)
    assert_same_bits(world, *found.values())
    trainer.close()


def a_resume_has_the_same_bits(world: World, name: str, folder: Path) -> None:
    """With the defaults of the strategy, and an optimizer that has state for each parameter."""
    # Clipping of parts rounds the norm otherwise than clipping of the whole, but alike before and after the resume.
    make = parts(lambda: make_strategy(name), adam)
    whole = Trainer(make, [StopAtStep(7)])
    whole.run()
    Trainer(make, [StopAtStep(5), Checkpoint(folder, steps=4)]).run()
    forget_last(world, folder, 5)
    resumed = Trainer(make, [StopAtStep(7), Checkpoint(folder, steps=100)])
    resumed.run()
    for trainer in (whole, resumed):
        trainer.own_state()  # a divided optimizer comes together
    assert bits(resumed) == bits(whole)
    whole.close()
    resumed.close()


def nan_is_named_and_changes_nothing(world: World, name: str, _: Path) -> None:
    odd, bad = world.size - 1, False

    def loss(module: Any, batch: Any) -> torch.Tensor:
        value = mean_loss(module, batch)
        return value * module.last.bias[0] / 0 if bad and world.rank == odd else value

    def build(world: World) -> Parts:
        module = made(Net)
        optimizer, more = sgd_of(0.0)(module)
        return replace(
            builder(Net, adam)(world), adapter=TorchModule(module, loss, optimizer, **more), strategy=as_sync(name)[0]
        )

    trainer = Trainer(build)
    trainer.step()
    before = [value.tobytes() for value in trainer.adapter.parameters().values()]
    bad = True
    text = error_on_all(world, NonFiniteError, trainer.step)
    assert f"{world.name(odd)}: the gradient of " in text
    assert [value.tobytes() for value in trainer.adapter.parameters().values()] == before
    bad = False
    assert math.isfinite(trainer.step().loss)
    assert_same_bits(world, *trainer.adapter.parameters().values())
    trainer.close()


@pytest.mark.parametrize(
    "holds",
    [means_are_by_samples, a_resume_has_the_same_bits, nan_is_named_and_changes_nothing],
    ids=lambda holds: holds.__name__,
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_contract(world: World, shared: Path, name: str, holds: Callable[[World, str, Path], None]) -> None:
    """What a strategy refuses on several ranks, it trains on one: equal ranks without a server, or buffers."""
    if world.size > 1 and isinstance(make_strategy(name), ServedStrategy):
        text = error_on_all(world, ConfigError, lambda: Trainer(parts(lambda: make_strategy(name), adam)))
        assert f"{world.size} equal ranks were started" in text
    elif world.size > 1 and name in CODED:
        text = error_on_all(world, ConfigError, lambda: Trainer(parts(lambda: make_strategy(name), adam)))
        assert "the model has 2 buffers whose mean all ranks need" in text
    else:
        holds(world, name, shared)


def test_a_module_in_sparse_rounds(world: World) -> None:
    """A module has the bits of a function with the same gradients, which are exact in float32 here."""
    count, per_rank = 10, 4
    rows = numpy.random.default_rng(5).integers(-40, 40, (6 * per_rank * world.size, count)).astype(numpy.float32) / 8

    def function(parameters: Any, batch: numpy.ndarray, on_gradient: Any) -> float:
        on_gradient("w", batch.mean(axis=0))
        return float((parameters["w"] * batch).sum() / len(batch))

    def module() -> TorchModule:
        made = torch.nn.Module()
        made.w = torch.nn.Parameter(torch.zeros(count))
        loss = lambda module, batch: (module.w * batch).sum(dim=1).mean()  # noqa: E731
        return TorchModule(made, loss, torch.optim.SGD(made.parameters(), lr=0.5))

    def trained(make: Callable[[], Any]) -> numpy.ndarray:
        def build(world: World) -> Parts:
            data = ArrayData(world, rows, global_batch=per_rank * world.size)
            return Parts(make(), SparseLoCo(2, density=0.3, decay=0.5), data)

        trainer = Trainer(build, [StopAtStep(6)])
        trainer.run()
        (value,) = trainer.adapter.parameters().values()
        assert_same_bits(world, value)
        found = value.copy()
        trainer.close()
        return found

    expected = trained(lambda: ArrayFunction(function, {"w": numpy.zeros(count, numpy.float32)}, SGD(0.5)))
    assert trained(module).tobytes() == expected.tobytes()
    assert numpy.count_nonzero(expected) >= 3
