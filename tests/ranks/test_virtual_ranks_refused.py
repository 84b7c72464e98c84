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


class Batches:
    """Data that cannot be cut."""

    epoch = steps_per_epoch = 0

    def state(self) -> dict[str, Any]:
        return {}


class Unseeded(ArrayFunction):
    seeded: Any = None


def of_sync(strategy: Callable[[], Sync], function: Any = noisy) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        return Parts(model(function), strategy(), ArrayData(world, samples(), global_batch=V))

    return build


def own_exchange() -> Sync:
    return Sync(lambda world: make_exchange(world, "ring"), virtual_ranks=V)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        *((builder(number=one), f"virtual_ranks={one!r}; it must be an int of at least 1") for one in (0, True, 7.0)),
        *((builder(seed=one), f"seed={one!r}; it must be an int of at least 0") for one in (-1, 0.5, None)),
        (builder(22), "virtual_ranks=7 and a global batch of 22 samples"),
        (builder(22), "Take global_batch=21 or 28"),
        (of_sync(own_exchange), "virtual_ranks=7 and an exchange= of its own"),
        (builder(data=lambda *_: Batches()), "Batches has no method cut(virtual_ranks)"),
        (builder(data=lambda *_: Prefetch(Prefetch(Batches()))), "Batches has no method cut(virtual_ranks)"),
    ],
)
def test_what_is_refused(world: World, build: Callable[[World], Parts], words: str) -> None:
    assert words in error_on_all(world, ConfigError, lambda: Trainer(build, [StopAtStep(1)], world=world))


def test_fewer_virtual_ranks_than_ranks(world: World) -> None:
    skip_alone(world)
    build = builder(20 * (world.size - 1), world.size - 1)
    text = error_on_all(world, ConfigError, lambda: Trainer(build, [StopAtStep(1)], world=world))
    assert f"virtual_ranks={world.size - 1} for {world.size} ranks" in text
    assert f"Start at most {world.size - 1} ranks" in text


def test_what_does_not_go_together(world: World) -> None:
    coded = world.replaced(config=replace(world.config, compression="int8"))
    text = error_on_all(world, ConfigError, lambda: Trainer(builder(), [StopAtStep(1)], world=coded))
    assert "virtual_ranks=7 and compression=int8" in text
    pieces = Accumulate(Unseeded(noisy, model().parameters(), SGD(0.01)), per_rank_batch=2)
    with pytest.raises(ConfigError, match=r"Unseeded has no method seeded\(key\)"):
        Trainer(builder(adapter=lambda: pieces), [StopAtStep(1)], world=world)
    trainer = Trainer(builder(), [StopAtStep(9), Balance(steps=1)], world=world)
    assert "each rank has whole virtual ranks" in error_on_all(world, ConfigError, trainer.run)


def test_functions_without_virtual_ranks(world: World) -> None:
    """One with random numbers needs them, unless they have a default; one of C has no signature."""

    class Native:
        @property
        def __signature__(self) -> Any:
            raise ValueError("no signature found")

        def __call__(self, parameters: Any, batch: Any, on_gradient: Any) -> float:
            return noisy(parameters, batch, on_gradient, numpy.random.default_rng(0))

    given: list[Any] = []

    def with_default(parameters: Any, batch: Any, on_gradient: Any, random: Any = None) -> float:
        given.append(random)
        return noisy(parameters, batch, on_gradient, numpy.random.default_rng(0))

    own = alone(world)
    with pytest.raises(GradientError, match="there are no virtual ranks"):
        Trainer(of_sync(Sync), [StopAtStep(1)], world=own).step()
    for function in (with_default, Native()):
        assert Trainer(of_sync(Sync, function), [StopAtStep(1)], world=own).step().number == 1
    assert given == [None]


def test_states_of_others(world: World) -> None:
    """Of another number, of another seed, and with values that a codec has left out."""
    _, _, written = trained(world, builder(), 1)
    for number, seed, words in ((21, 5, "virtual_ranks=21"), (7, 6, "seed=6")):
        trainer = Trainer(builder(number=number, seed=seed), [StopAtStep(2)], world=world)
        before = bits(trainer)
        with pytest.raises(CheckpointError, match=words):
            trainer.restore(written.state())
        assert bits(trainer) == before
    left_out = {"place": "elsewhere", "residual": dict(trainer.adapter.parameters())}
    with pytest.raises(CheckpointError, match="virtual ranks send all of a gradient"):
        trainer.strategy.restore_own(left_out)
