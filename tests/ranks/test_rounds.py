"""LocalSGD, DiLoCo and StreamingDiLoCo: what every rank has, also within a round."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, LocalSGD, Sync, World
from mpitrain.optim import SGD, LossScale

from .common import assert_same_bits
from .rounds_by_hand import EVERY, KINDS, STEPS, Expected, assert_close, flat, kinds, streaming
from .test_strategies import RATE, WIDTH, adapter, quadratic, samples, train, values


@kinds
def test_every_rank_has_its_own_values_and_all_meet(world: World, kind: str) -> None:
    strategy, model, expected = KINDS[kind][0](), adapter(seed=world.rank), Expected(world.size, kind)
    strategy.begin(world, model)
    for step in range(STEPS):
        loss = expected.step()
        assert train(world, strategy, model, range(step, step + 1)) == pytest.approx([loss], rel=1e-12)
        assert_close(flat(model), expected.own[world.rank])
        if (step + 1) % EVERY == 0 and kind in ("local_sgd", "diloco"):
            assert_same_bits(world, *values(model))
    strategy.end_run()
    expected.end()
    assert_close(flat(model), expected.common)
    assert_same_bits(world, *values(model))
    strategy.end_run()  # there is nothing to end
    assert_close(flat(model), expected.common)
    strategy.close()


@kinds
def test_a_run_shorter_than_a_round(world: World, kind: str) -> None:
    """It ends with an outer step, in which the ranks meet."""
    strategy, model, expected = KINDS[kind][0](), adapter(), Expected(world.size, kind)
    strategy.begin(world, model)
    for step in range(EVERY - 1):
        expected.step()
        train(world, strategy, model, range(step, step + 1))
    assert world.size == 1 or not strategy.replicas_are_equal
    strategy.end_run()
    expected.end()
    assert_close(flat(model), expected.common)
    assert_same_bits(world, *values(model))
    strategy.close()


def test_the_warm_up_is_synchronous(world: World) -> None:
    """Bit for bit, also if it is resumed in its middle."""
    plain, model = Sync(), adapter()
    plain.begin(world, model)
    train(world, plain, model, range(4))
    strategies = [LocalSGD(2, warm_up=4), LocalSGD(2, warm_up=4)]
    models = [adapter(), adapter(seed=5)]
    for strategy, one in zip(strategies, models, strict=True):
        strategy.begin(world, one)
    train(world, strategies[0], models[0], range(3))
    strategies[1].restore(strategies[0].state())
    models[1].restore(models[0].state())
    strategies[1].restore_own(strategies[0].own_state())
    for strategy, one in zip(strategies, models, strict=True):
        train(world, strategy, one, range(3, 4))
        assert [value.tobytes() for value in values(one)] == [value.tobytes() for value in values(model)]
        train(world, strategy, one, range(4, 5))
        is_equal = len(set(world.allgather(values(one)[0].tobytes()))) == 1
        assert is_equal is (world.size == 1)
        train(world, strategy, one, range(5, 6))
        assert_same_bits(world, *values(one))
        strategy.close()
    plain.close()


def test_steps_that_are_skipped_leave_no_difference(world: World) -> None:
    """The loss scale skips all steps of a flight. The ranks are apart after it, and meet at the end of the run."""
    is_infinite = False

    def scaled(parameters: Any, batch: Any, on_gradient: Any, loss_scale: float) -> float:
        def hand_in(name: str, gradient: Any) -> None:
            on_gradient(name, gradient * (numpy.inf if is_infinite else loss_scale))

        return quadratic(parameters, batch, hand_in)

    parameters = {"w": numpy.zeros(WIDTH), "v": numpy.zeros((2, 3))}
    model = ArrayFunction(scaled, parameters, SGD(RATE), loss_scale=LossScale())
    strategy = streaming(1, 1, 0.5)
    strategy.begin(world, model)
    for step in range(EVERY + 1):
        is_infinite = step == EVERY
        batch = samples(world.rank, step, 2 + world.rank)
        strategy.begin_step(len(batch))
        with numpy.errstate(invalid="ignore"):
            strategy.finish_step(model, model.loss_and_gradients(batch, strategy.on_gradient))
    assert not strategy.replicas_are_equal
    strategy.end_run()
    assert strategy.replicas_are_equal
    assert_same_bits(world, *values(model))
    strategy.close()
