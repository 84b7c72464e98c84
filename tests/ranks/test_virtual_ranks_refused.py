"""Virtual ranks: what a training with them refuses, and functions with and without random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import Accumulate, ArrayFunction, Balance, Parts, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData, Prefetch
from mpitrain.errors import CheckpointError, ConfigError, GradientError
from mpitrain.optim import SGD
from mpitrain.reducer.exchange import make_exchange

from .common import error_on_all, skip_alone
from .trainings import bits
from .virtual_trainings import V, alone, builder, model, noisy, one_thread, samples, trained

__all__ = ["one_thread"]


def refused(world: World, build: Callable[[World], Parts], kind: Any = ConfigError) -> str:
    return error_on_all(world, kind, lambda: Trainer(build, [StopAtStep(1)], world=world))


def test_fewer_virtual_ranks_than_ranks(world: World) -> None:
    skip_alone(world)
    text = refused(world, builder(20 * (world.size - 1), world.size - 1))
    assert f"virtual_ranks={world.size - 1} for {world.size} ranks" in text
    assert f"Start at most {world.size - 1} ranks" in text


@pytest.mark.parametrize("number", [0, -1, True, 7.0, "7"], ids=repr)
def test_a_number_that_is_none(world: World, number: Any) -> None:
    assert f"virtual_ranks={number!r}; it must be an int of at least 1" in refused(world, builder(number=number))


@pytest.mark.parametrize("seed", [-1, 0.5, None], ids=repr)
def test_a_seed_that_is_none(world: World, seed: Any) -> None:
    assert f"seed={seed!r}; it must be an int of at least 0" in refused(world, builder(seed=seed))


def test_a_batch_that_is_not_a_multiple(world: World) -> None:
    text = refused(world, builder(22))
    assert "virtual_ranks=7 and a global batch of 22 samples" in text
    assert "Take global_batch=21 or 28" in text


def test_a_codec(world: World) -> None:
    coded = world.replaced(config=replace(world.config, compression="int8"))
    text = error_on_all(world, ConfigError, lambda: Trainer(builder(), [StopAtStep(1)], world=coded))
    assert "virtual_ranks=7 and compression=int8" in text


def test_an_exchange_of_ones_own(world: World) -> None:
    def build(world: World) -> Parts:
        strategy = Sync(lambda world: make_exchange(world, "ring"), virtual_ranks=V)
        return Parts(model(), strategy, ArrayData(world, samples(), global_batch=V))

    assert "virtual_ranks=7 and an exchange= of its own" in refused(world, build)


@pytest.mark.parametrize(
    "wrapped",
    [lambda data: data, Prefetch, lambda data: Prefetch(Prefetch(data))],
    ids=["by itself", "prefetched", "prefetched twice"],
)
def test_data_that_cannot_be_cut(world: World, wrapped: Callable[[Any], Any]) -> None:
    class Batches:
        epoch = steps_per_epoch = 0

        def state(self) -> dict[str, Any]:
            return {}

    text = refused(world, builder(data=lambda world, global_batch: wrapped(Batches())))
    assert "Batches has no method cut(virtual_ranks)" in text


def test_an_adapter_in_pieces_without_random_numbers(world: World) -> None:
    class Unseeded(ArrayFunction):
        seeded: Any = None

    pieces = Accumulate(Unseeded(noisy, model().parameters(), SGD(0.01)), per_rank_batch=2)
    with pytest.raises(ConfigError, match=r"Unseeded has no method seeded\(key\)"):
        Trainer(builder(adapter=lambda: pieces), [StopAtStep(1)], world=world)


def test_balance(world: World) -> None:
    trainer = Trainer(builder(), [StopAtStep(9), Balance(steps=1)], world=world)
    assert "each rank has whole virtual ranks" in error_on_all(world, ConfigError, trainer.run)


def test_a_function_with_random_needs_virtual_ranks(world: World) -> None:
    def build(world: World) -> Parts:
        return Parts(model(), Sync(), ArrayData(world, samples(), global_batch=V))

    with pytest.raises(GradientError, match="there are no virtual ranks"):
        Trainer(build, [StopAtStep(1)], world=alone(world)).step()


def test_a_function_with_random_and_a_default_needs_none(world: World) -> None:
    given: list[Any] = []

    def function(parameters: Any, batch: Any, on_gradient: Any, random: Any = None) -> float:
        given.append(random)
        return noisy(parameters, batch, on_gradient, numpy.random.default_rng(0))

    def build(world: World) -> Parts:
        return Parts(model(function), Sync(), ArrayData(world, samples(), global_batch=V))

    Trainer(build, [StopAtStep(1)], world=alone(world)).step()
    assert given == [None]


def test_a_function_without_a_signature(world: World) -> None:
    class Native:
        """As a function of a C extension is."""

        @property
        def __signature__(self) -> Any:
            raise ValueError("no signature found")

        def __call__(self, parameters: Any, batch: Any, on_gradient: Any) -> float:
            return noisy(parameters, batch, on_gradient, numpy.random.default_rng(0))

    def build(world: World) -> Parts:
        return Parts(model(Native()), Sync(), ArrayData(world, samples(), global_batch=V))

    assert Trainer(build, [StopAtStep(1)], world=alone(world)).step().number == 1


@pytest.mark.parametrize(("number", "seed", "words"), [(21, 5, "virtual_ranks=21"), (7, 6, "seed=6")])
def test_a_checkpoint_of_others(world: World, number: int, seed: int, words: str) -> None:
    _, _, written = trained(world, builder(), 1)
    trainer = Trainer(builder(number=number, seed=seed), [StopAtStep(2)], world=world)
    before = bits(trainer)
    with pytest.raises(CheckpointError, match=words):
        trainer.restore(written.state())
    assert bits(trainer) == before


def test_values_that_a_codec_has_left_out(world: World) -> None:
    trainer = Trainer(builder(), [StopAtStep(2)], world=world)
    left_out = {"place": "elsewhere", "residual": dict(trainer.adapter.parameters())}
    with pytest.raises(CheckpointError, match="virtual ranks send all of a gradient"):
        trainer.strategy.restore_own(left_out)
