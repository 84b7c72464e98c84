"""Rounds with arrays on the GPU: as those on NumPy, with checkpoints and steps that cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from mpitrain import (
    ArrayFunction,
    Checkpoint,
    DiLoCo,
    LocalSGD,
    Parts,
    SparseLoCo,
    StopAtStep,
    StreamingDiLoCo,
    Trainer,
    World,
)
from mpitrain.errors import NonFiniteError
from mpitrain.optim import SGD
from mpitrain.reducer.exchange import Exchange, PlainExchange
from mpitrain.strategies import Strategy
from tests.ranks.common import assert_same_bits, error_on_all
from tests.ranks.test_rounds_resumed import forget_last

from .test_training import assert_close, bits, builder, trained

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


def plain(own: World) -> Exchange:
    return PlainExchange(own, transport="staged")


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "local_sgd": lambda: LocalSGD(3, exchange=plain),
    "diloco": lambda: DiLoCo(3, exchange=plain),
    "streaming_diloco": lambda: StreamingDiLoCo(3, fragments=3, delay=2, exchange=plain),
}
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def build(strategy: str, xp: ModuleType = cupy) -> Callable[[World], Parts]:
    return lambda world: replace(builder(xp, dtype="float64")(world), strategy=STRATEGIES[strategy]())


@strategies
def test_rounds_equal_those_on_numpy(world: World, strategy: str) -> None:
    trainer, losses = trained(build(strategy), 8)
    expected, expected_losses = trained(build(strategy, numpy), 8)
    assert all(isinstance(value, cupy.ndarray) for value in trainer.adapter.parameters().values())
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    assert_close(trainer, expected, rtol=1e-9, atol=1e-12)
    assert_same_bits(world, *(value.get() for value in trainer.adapter.parameters().values()))


@strategies
def test_a_resume_within_a_round(world: World, shared: Path, strategy: str) -> None:
    whole, _ = trained(build(strategy), 9)
    trained(build(strategy), 7, Checkpoint(shared, steps=5))
    forget_last(world, shared, 7)
    resumed, _ = trained(build(strategy), 9, Checkpoint(shared, steps=100))
    assert bits(resumed) == bits(whole)


def test_an_outer_step_that_cannot_be_made_changes_nothing(world: World) -> None:
    """Finite gradients make infinite parameters on the last rank, in the last step of the round."""

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        for name, value in parameters.items():
            huge = world.rank == world.size - 1 and name == "dense1.weight"
            on_gradient(name, cupy.full(value.shape, 1.5e308 if huge else 1.0, value.dtype))
        return 0.0

    def make(its: World) -> Parts:
        parts = build("diloco")(its)
        adapter = ArrayFunction(function, parts.adapter.parameters(), SGD(1.0, momentum=0.9))
        return Parts(adapter, DiLoCo(2, exchange=plain), parts.data)

    trainer = Trainer(make, [StopAtStep(4)])
    trainer.step()
    before = {name: value for name, value in bits(trainer).items() if not name.startswith("data/")}
    text = error_on_all(world, NonFiniteError, trainer.step)
    assert "dense1.weight has become NaN or infinity in the steps of this round" in text
    assert {name: value for name, value in bits(trainer).items() if not name.startswith("data/")} == before
    trainer.close()


def test_sparse_rounds_have_the_bits_of_numpy(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """What is sent is coded on the host, which a line says; what is not sent stays there and fades."""

    def trained_on(xp: ModuleType) -> list[bytes]:
        def function(_: Any, batch: numpy.ndarray, on_gradient: Any) -> float:
            on_gradient("w", xp.asarray(batch))
            return 0.0

        model = ArrayFunction(function, {"w": xp.zeros(5000, numpy.float32)}, SGD(1.0))
        strategy = SparseLoCo(2, density=0.02, decay=0.75)
        strategy.begin(world, model)
        for step in range(6):
            batch = numpy.random.default_rng((world.rank, step)).standard_normal(5000).astype(numpy.float32)
            strategy.begin_step(1 + world.rank)
            strategy.finish_step(model, model.loss_and_gradients(batch, strategy.on_gradient))
        value = model.parameters()["w"]
        assert isinstance(value, xp.ndarray)
        kept = strategy.own_state().get("residual", {}).get("round/0/left out/w", numpy.zeros(0))
        assert kept.any() == (world.size > 1)
        strategy.close()
        return [(value if xp is numpy else value.get()).tobytes(), kept.tobytes()]

    capfd.readouterr()
    found = trained_on(cupy)
    said = capfd.readouterr().out.count("gradients are coded on the CPU")
    assert said == (1 if world.is_root and world.size > 1 else 0)
    assert found == trained_on(numpy)
