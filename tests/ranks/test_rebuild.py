"""A training that continues in another World ends with the bits of one that did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from models import mlp
from mpitrain import ArrayFunction, Checkpoint, Hook, Parts, ShardedSync, Step, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData, Prefetch
from mpitrain.errors import GradientError
from mpitrain.job.worlds import make_world
from mpitrain.optim import SGD
from mpitrain.state.names import join, split
from mpitrain.strategies import Strategy

from .placements import placed
from .trainings import CLASSES, HIDDEN, INPUTS, bits, builder, ran, samples_of

STEPS = 9


class Rebuild(Hook):
    """A hook that continues in a new World after some steps."""

    def __init__(self, steps: tuple[int, ...], new_world: Callable[[World], World]) -> None:
        self._steps = steps
        self._new_world = new_world
        self.told = 0

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.number in self._steps:
            old = trainer.world
            trainer.rebuild(self._new_world(old))
            old.free()

    def world_changed(self, trainer: Trainer) -> None:
        self.told += 1


def build_in_float32(world: World) -> Parts:
    """Build in float32, which codecs need."""
    rng = numpy.random.default_rng(1)
    sizes: Any = {"inputs": INPUTS, "hidden": (HIDDEN,), "classes": CLASSES}
    parameters = mlp.initial(rng, numpy, dtype="float32", **sizes)
    x, labels = samples_of(71)
    data = ArrayData(world, (x.astype(numpy.float32), labels), global_batch=23)
    return Parts(ArrayFunction(mlp.loss_and_gradients, parameters, SGD(0.1, momentum=0.9)), Sync(), data)


def read_ahead(build: Callable[[World], Parts]) -> Callable[[World], Parts]:
    def build_with_a_thread(world: World) -> Parts:
        parts = build(world)
        return replace(parts, data=Prefetch(parts.data))

    return build_with_a_thread


@pytest.mark.parametrize(("compression", "placement"), [("none", "one node"), ("int8", "dealt out over 2 nodes")])
def test_the_same_bits(world: World, compression: str, placement: str) -> None:
    """At batches that no number of ranks divides, across the end of an epoch, with momentum and with residuals."""

    def new_world(old: World) -> World:
        config = replace(world.config, compression=compression)
        made = make_world(world.comm, config, old.generation + 1)
        return made if placement == "one node" else placed(made, placement)

    build = read_ahead(build_in_float32 if compression == "int8" else builder(71, 23))
    whole = ran(build, [StopAtStep(STEPS)], new_world(world))
    hook = Rebuild((1, 4, 7), new_world)
    rebuilt = ran(build, [hook, StopAtStep(STEPS)], new_world(world))
    assert rebuilt.world.generation == whole.world.generation + 3
    assert hook.told == 3
    assert rebuilt.step_number == STEPS
    assert bits(rebuilt) == bits(whole)
    own, expected = (trainer.strategy.own_state() for trainer in (rebuilt, whole))
    assert (
        own.keys() == expected.keys() == ({"place", "residual"} if compression == "int8" and world.size > 1 else set())
    )
    for name, value in expected.get("residual", {}).items():
        numpy.testing.assert_array_equal(own["residual"][name], value)
    for trainer in (whole, rebuilt):
        trainer.close()
        trainer.world.free()
    assert world.sum(1) == world.size


def test_what_was_left_out_goes_along_to_other_places(world: World) -> None:
    """If ranks are in other places, the sum of their residuals goes into the next means."""
    if world.size < 3:
        pytest.skip("two ranks have one placement on two nodes")
    config = replace(world.config, compression="int8")
    before = placed(make_world(world.comm, config), "dealt out over 2 nodes")
    after = placed(make_world(world.comm, config), "alone on each node")
    trainer = Trainer(build_in_float32, [], before)
    for _ in range(3):
        trainer.step()
    left = world.allgather(trainer.strategy.own_state()["residual"])
    trainer.rebuild(after)
    carried = world.allgather(trainer.strategy.own_state()["carried"])
    for name in left[0]:
        numpy.testing.assert_array_equal(
            sum(numpy.float64(part[name]) for part in carried), sum(numpy.float64(part[name]) for part in left)
        )
    assert any(part[name].any() for part in left for name in part)
    trainer.close()


SHAPES = {"a": (7,), "b": (3, 2), "c": (1,)}


def build_without_gradients(strategy: Callable[[], Strategy]) -> Callable[[World], Parts]:
    """Build a model whose gradients are 0: a step moves the parameters by what is carried, and by nothing else."""
    zeros = {name: numpy.zeros(shape, numpy.float32) for name, shape in SHAPES.items()}

    def gradients(parameters: Any, batch: Any, on_gradient: Any) -> float:
        for name, value in zeros.items():
            on_gradient(name, value)
        return 0.0

    def build(world: World) -> Parts:
        data = ArrayData(world, (numpy.arange(50),), global_batch=7)
        parameters = {name: value.copy() for name, value in zeros.items()}
        return Parts(ArrayFunction(gradients, parameters, SGD(1.0)), strategy(), data)

    return build


@pytest.mark.parametrize("strategy", [Sync, ShardedSync])
@pytest.mark.parametrize("placement", ["one node", "alone on each node"])
def test_what_is_carried_waits_for_a_step(
    world: World, strategy: Callable[[], Strategy], placement: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a codec, through two rebuilds and the parts of a checkpoint. Only odd ranks, or a single one, carry."""
    made = make_world(world.comm, replace(world.config, compression="none"))
    there = made if placement == "one node" else placed(made, placement)
    of_ranks = [
        {
            name: numpy.random.default_rng((rank, len(shape))).integers(1, 99, shape).astype("f4")
            for name, shape in SHAPES.items()
        }
        if rank % 2 or world.size == 1
        else {}
        for rank in range(world.size)
    ]
    first = Trainer(build_without_gradients(strategy), [], there)
    first.strategy.restore_own({"carried": of_ranks[world.rank]})
    first.rebuild(there)
    first.rebuild(there)
    parts = world.allgather(join(dict(pair for half in split(first.strategy.own_state()) for pair in half.items())))
    assert all(parts)  # else a checkpoint would not count them, or take them for lost
    capfd.readouterr()
    second = Trainer(build_without_gradients(strategy), [], there)
    second.restore_own("step 0", world.size, parts.__getitem__, reads=world.is_root)
    assert "lost" not in capfd.readouterr().out
    for trainer in (first, second):
        for _ in range(2):
            trainer.step()
            assert trainer.strategy.own_state() == {}
            for name, value in trainer.adapter.parameters().items():
                numpy.testing.assert_array_equal(value, -sum(numpy.float64(its.get(name, 0)) for its in of_ranks))
        trainer.close()
    made.free()


def test_a_closed_trainer_makes_no_step(world: World) -> None:
    trainer = Trainer(builder(24, 8))
    trainer.step()
    for _ in range(2):
        trainer.close()
    with pytest.raises(GradientError, match=r"begin\(\) after close\(\); make another GradientReducer"):
        trainer.step()


def test_checkpoints_go_on(world: World, shared: Path) -> None:
    """Checkpoints from after the change continue those from before."""
    build = builder(71, 23)
    whole = ran(build, [StopAtStep(STEPS)])
    hooks = [Rebuild((3,), lambda old: make_world(world.comm)), Checkpoint(shared, steps=2), StopAtStep(6)]
    first = ran(build, hooks, make_world(world.comm))
    resumed = ran(build, [Checkpoint(shared, steps=2), StopAtStep(STEPS)])
    assert bits(resumed) == bits(whole)
    first.close()
    first.world.free()
