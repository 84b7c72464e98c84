"""Rounds on several nodes, with codecs and threads, with a loss scale, and in other Worlds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, Hook, Parts, Step, StopAtStep, StreamingDiLoCo, Trainer, World
from mpitrain.config import read_config
from mpitrain.job.worlds import make_world
from mpitrain.optim import SGD, LossScale
from mpitrain.state.resume import add_up

from .common import assert_same_bits, skip_alone
from .placements import placed
from .rounds_by_hand import EVERY, KINDS, STEPS, Expected, all_bits, assert_close, flat, kinds
from .test_strategies import MOMENTUM, RATE, adapter, count_of, quadratic, samples, train, values
from .trainings import builder


@pytest.mark.usefixtures("driven")
@kinds
def test_on_several_nodes(world: World, kind: str) -> None:
    """With and without a thread that drives what travels."""
    strategy, model, expected = KINDS[kind][0](), adapter(), Expected(world.size, kind)
    strategy.begin(placed(world, "3 nodes of different size"), model)
    for step in range(STEPS):
        expected.step()
        train(world, strategy, model, range(step, step + 1))
        assert_close(flat(model), expected.own[world.rank])
    strategy.end_run()
    expected.end()
    assert_close(flat(model), expected.common)
    assert_same_bits(world, *values(model))
    strategy.close()


@kinds
def test_a_loss_scale_changes_nothing(world: World, kind: str) -> None:
    """It grows twice, and is a power of two."""

    def scaled(parameters: Any, batch: Any, on_gradient: Any, loss_scale: float) -> float:
        return quadratic(parameters, batch, lambda name, gradient: on_gradient(name, gradient * loss_scale))

    plain = adapter()
    optimizer = SGD(lambda step: RATE / (1 + step), momentum=MOMENTUM)
    scale = LossScale(2.0**10, growth_interval=3)
    model = ArrayFunction(scaled, plain.parameters(), optimizer, loss_scale=scale)
    strategy, expected = KINDS[kind][0](), Expected(world.size, kind)
    strategy.begin(world, model)
    for step in range(STEPS):
        expected.step()
        train(world, strategy, model, range(step, step + 1))
        assert_close(flat(model), expected.own[world.rank])
    assert scale.value == 2.0**12
    strategy.close()


class Rebuild(Hook):
    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.number in self.steps:
            trainer.rebuild(make_world(trainer.world.comm))


@kinds
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_round_goes_on_in_another_world(world: World, kind: str, is_shared: bool) -> None:
    """Bit for bit, also if `build` always returns the same model."""
    made: list[Any] = []

    def build(its: World) -> Parts:
        parts = builder(45, 14, strategy=KINDS[kind][0])(its)
        made.append(parts.adapter)
        return replace(parts, adapter=made[0]) if is_shared else parts

    whole = Trainer(builder(45, 14, strategy=KINDS[kind][0]), [StopAtStep(8)], make_world(world.comm))
    rebuilt = Trainer(build, [StopAtStep(8), Rebuild((1, 4, 6))], make_world(world.comm))
    for trainer in (whole, rebuilt):
        trainer.run()
    assert len(made) == 4
    assert all_bits(rebuilt.strategy, rebuilt.adapter) == all_bits(whole.strategy, whole.adapter)
    for trainer in (whole, rebuilt):
        trainer.close()


# -- codecs ------------------------------------------------------------------------------------------------------------


def coded(world: World) -> World:
    own = placed(world, "alone on each node")
    return own.replaced(config=read_config({"MPITRAIN_COMPRESSION": "int4"}, {}))


def narrow(delay: int) -> StreamingDiLoCo:
    """Its outer steps take over the whole mean, so nothing may be missing or there twice."""
    return StreamingDiLoCo(EVERY, fragments=1, delay=delay, alpha=0.5, outer=SGD(1.0))


def left_out(world: World, own: dict[str, Any]) -> numpy.ndarray:
    """The sum over the ranks, in float64."""
    mine = {
        name.removeprefix("round/0/left out/"): value.astype("float64").ravel()
        for name, value in own.get("residual", {}).items()
        if name.startswith("round/0/left out/")
    }
    of_all = world.allgather(numpy.concatenate([mine["w"], mine["v"]]))
    return sum(of_all)


def mean_distance(world: World, steps: int, own: numpy.ndarray) -> numpy.ndarray:
    counts = [sum(count_of(rank, step, world.size) for step in range(steps)) for rank in range(world.size)]
    begin = flat(adapter(dtype="float32")).astype("float64")
    gone = [count * (begin - one) for count, one in zip(counts, world.allgather(own.astype("float64")), strict=True)]
    return sum(gone) / sum(counts)


def train_narrow(world: World, strategy: StreamingDiLoCo, model: ArrayFunction, steps: range) -> None:
    for step in steps:
        batch = samples(world.rank, step, count_of(world.rank, step, world.size)).astype("float32")
        strategy.begin_step(len(batch))
        strategy.finish_step(model, model.loss_and_gradients(batch, strategy.on_gradient))


def taken_back_at_the_end(strategy: StreamingDiLoCo, model: ArrayFunction, _: World) -> Any:
    strategy.end_run()
    return strategy, model


def taken_back_by_others(strategy: StreamingDiLoCo, model: ArrayFunction, there: World) -> Any:
    """Another delay is another schedule, so the parts of the ranks are added up."""
    own, state, saved = strategy.own_state(), strategy.state(), model.state()
    again, resumed = narrow(1), adapter(seed=3, dtype="float32")
    again.begin(there, resumed)
    again.restore(state)
    resumed.restore(saved)
    total: dict[str, Any] = {}
    add_up(total, own)
    again.restore_own(total)
    again.end_run()
    return again, resumed


@pytest.mark.parametrize("take_back", [taken_back_at_the_end, taken_back_by_others])
def test_what_a_codec_leaves_out_of_a_message_that_is_taken_back(world: World, take_back: Callable[..., Any]) -> None:
    """What the ranks have taken over, and what the codec has left out of it, is how far they have gone: no more."""
    skip_alone(world)
    there, strategy, model = coded(world), narrow(EVERY), adapter(dtype="float32")
    strategy.begin(there, model)
    train_narrow(world, strategy, model, range(4))  # what is sent before the fourth step travels on
    expected = mean_distance(world, 4, flat(model))
    ended, its_model = take_back(strategy, model, there)
    gone = flat(adapter(dtype="float32")).astype("float64") - flat(its_model)
    left = left_out(world, ended.own_state())
    assert abs(left).max() > 1e-3
    numpy.testing.assert_allclose(gone + left, expected, atol=1e-5)
    assert_same_bits(world, *values(its_model))


def test_a_coded_round_is_resumed_with_the_same_bits(world: World) -> None:
    """In the middle of a round, with a message under way, and with what the codec has left out of earlier ones."""
    there, whole, model = coded(world), narrow(2), adapter(dtype="float32")
    whole.begin(there, model)
    train_narrow(world, whole, model, range(7))
    own, state, saved = whole.own_state(), whole.state(), model.state()
    again, resumed = narrow(2), adapter(seed=3, dtype="float32")
    again.begin(there, resumed)
    again.restore(state)
    resumed.restore(saved)
    again.restore_own(own)
    assert all_bits(again, resumed) == all_bits(whole, model)
    for strategy, one in ((whole, model), (again, resumed)):
        train_narrow(world, strategy, one, range(7, 9))
        strategy.end_run()
    assert all_bits(again, resumed) == all_bits(whole, model)
    assert_same_bits(world, *values(resumed))
