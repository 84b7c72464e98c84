"""What ShardedSync refuses, and what it says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, ShardedSync, Sync, World
from mpitrain.errors import ConfigError, MismatchError
from mpitrain.optim import SGD, Adam, AdamW

from .common import error_on_all, skip_alone
from .sharded import parameters, scattered, train


@pytest.mark.parametrize(
    ("optimizers", "text"),
    [
        ((lambda: Adam(0.01), lambda: Adam(0.02)), "0.02"),
        ((lambda: AdamW(0.01, weight_decay=0.1), lambda: AdamW(0.01, weight_decay=0.2)), "0.2"),
        ((lambda: Adam(0.01), lambda: SGD(0.01)), "SGD"),
        ((lambda: SGD(0.01, clip_norm=1.0), lambda: SGD(0.01)), "None"),
        ((lambda: SGD(0.01, clip_norm=1.0), lambda: SGD(0.01, clip_norm=numpy.float32(0.1))), "0.1000000014"),
        (tuple(lambda of=of: SGD(0.01, momentum=numpy.float32(of)) for of in (0.5, 0.25)), "0.25"),
    ],
)
def test_optimizers_that_differ(world: World, optimizers: Any, text: str) -> None:
    skip_alone(world)
    model = ArrayFunction(scattered, parameters("float64"), optimizers[world.rank == 1]())
    said = error_on_all(world, MismatchError, lambda: ShardedSync().begin(world, model))
    assert f"{world.name(1)}: " in said
    assert text in said


def test_schedules_that_differ(world: World) -> None:
    """A function cannot be compared, but the rates of each step are."""
    skip_alone(world)
    rate = 0.5 if world.rank == 1 else 0.25
    strategy = ShardedSync()
    model = ArrayFunction(scattered, parameters("float64"), SGD(lambda step: 0.25 if step == 0 else rate))
    strategy.begin(world, model)
    train(world, strategy, model, range(1))
    said = error_on_all(world, MismatchError, lambda: train(world, strategy, model, range(1, 2)))
    assert f"{world.name(1)} has updated its part of the parameters with the learning rate 0.5" in said
    assert f"{world.name(0)}: the learning rate 0.25 and " in said
    strategy.close()


def test_the_choice_of_auto_is_said(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    there = world.replaced(config=replace(world.config, compression="auto"))
    strategy = ShardedSync()
    strategy.begin(there, ArrayFunction(scattered, parameters("float64"), SGD(0.1)))
    strategy.close()
    said = "mpitrain: compression auto: none; a divided optimizer sends gradients and parameters as they are\n"
    assert capsys.readouterr().out == (said if world.is_root else "")


def test_another_strategy_on_one_rank(world: World) -> None:
    skip_alone(world)
    strategy = Sync() if world.rank == 1 else ShardedSync()
    model = ArrayFunction(scattered, parameters("float64"), SGD(0.1))
    error_on_all(world, MismatchError, lambda: strategy.begin(world, model))


def test_what_cannot_be_divided(world: World) -> None:
    class Own:
        """An optimizer of somebody else."""

        def start(self, parameters: Any, decayed: Any) -> None: ...

    model = ArrayFunction(scattered, parameters("float64"), Own())  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:  # the lowest rank raises its own error, the others quote it
        ShardedSync().begin(world, model)
    said = world.broadcast_object(str(caught.value))
    assert world.rank == 0 or f"{world.name(0)}, divide the optimizer: {said}" == str(caught.value)
    assert "Own has no method keep_only(ranges, norm_of_all)" in said
    coded = world.replaced(config=replace(world.config, compression="bf16"))
    model = ArrayFunction(scattered, parameters("float32"), SGD(0.1))
    said = error_on_all(world, ConfigError, lambda: ShardedSync().begin(coded, model))
    assert "compression=bf16" in said
    native = world.replaced(config=replace(world.config, algorithm="native"))
    said = error_on_all(world, ConfigError, lambda: ShardedSync().begin(native, model))
    assert "native has no halves" in said
    strategy = ShardedSync()
    strategy.begin(world, model)
    with pytest.raises(ConfigError, match="divided between ranks already"):
        ShardedSync().begin(world, model)
    strategy.close()
