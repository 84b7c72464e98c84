"""Rounds: what every rank has, on several nodes, with codecs, threads and a loss scale, in other Worlds, by speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import (
    ArrayFunction,
    Balance,
    Hook,
    LocalSGD,
    Parts,
    Step,
    StopAtStep,
    StreamingDiLoCo,
    Sync,
    Trainer,
    World,
)
from mpitrain.config import read_config
from mpitrain.data import ArrayData
from mpitrain.job.worlds import make_world
from mpitrain.optim import SGD, LossScale

from .common import added_up, assert_same_bits, skip_alone
from .placements import placed
from .rounds_by_hand import EVERY, KINDS, STEPS, Expected, all_bits, assert_close, flat, kinds, streaming
from .test_data_balance import Pretend
from .test_strategies import MOMENTUM, RATE, WIDTH, adapter, count_of, quadratic, samples, train, values
from .trainings import builder


@kinds
@pytest.mark.parametrize("steps", [EVERY - 1, STEPS], ids=["shorter than a round", "rounds"])
@pytest.mark.parametrize("threaded", [False, True])
def test_every_rank_has_its_own_values_and_all_meet(
    world: World, kind: str, steps: int, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one node, and of several with a thread that drives what travels; the end of a run is an outer step."""
    monkeypatch.setattr("mpitrain.reducer.driver.threads_by_default", lambda _: threaded)
    there = placed(world, "3 nodes of different size") if threaded else world
    strategy, model, expected = KINDS[kind][0](), adapter(seed=world.rank), Expected(world.size, kind)
    strategy.begin(there, model)
    for step in range(steps):
        loss = expected.step()
        assert train(world, strategy, model, range(step, step + 1)) == pytest.approx([loss], rel=1e-12)
        assert_close(flat(model), expected.own[world.rank])
        if (step + 1) % EVERY == 0 and kind in ("local_sgd", "diloco"):
            assert_same_bits(world, *values(model))
    assert world.size == 1 or not strategy.replicas_are_equal
    expected.end()
    for _ in range(2):  # the second time there is nothing to end
        strategy.end_run()
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
@pytest.mark.parametrize("is_shared", [pytest.param(False, marks=pytest.mark.nightly), True])
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
    total = added_up([own])
    again.restore_own(total)
    again.end_run()
    return again, resumed


@pytest.mark.parametrize("take_back", [taken_back_at_the_end, taken_back_by_others])
def test_what_a_codec_leaves_out_of_a_message_that_is_taken_back(world: World, take_back: Callable[..., Any]) -> None:
    """What the ranks have taken over, and what the codec has not sent of it, is how far they have gone: no more."""
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
    """In the middle of a round, with a message under way, and with what the codec has not sent of earlier ones."""
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


COUNT, BATCH = 171, 64  # the last batch of an epoch has 43
X = numpy.random.default_rng(8).standard_normal((COUNT, WIDTH))


def parts_of(size: int, length: int, speeds: list[float]) -> list[slice]:
    """The share of each rank. Written anew: the slowest rank ends as early as possible, and has a sample."""
    counts = [1] * size
    for _ in range(length - size):
        counts[min(range(size), key=lambda rank: ((counts[rank] + 1) / speeds[rank], rank))] += 1
    ends = numpy.cumsum(counts)
    return [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]


class Read:
    """The model, and the samples that this rank has read in the present epoch."""

    def __init__(self) -> None:
        self.seen: Counter[bytes] = Counter()

    def __call__(self, parameters: Any, batch: Any, on_gradient: Any) -> float:
        self.seen.update(row.tobytes() for row in batch[0])
        return quadratic(parameters, batch[0], on_gradient)


@kinds
def test_shares_by_speed(world: World, kind: str) -> None:
    """Speeds 1, 1/2, 1/4 and so on. Each sample of an epoch is used once; the outer mean weighs the samples."""
    read, hook = Read(), Pretend(Balance(2), 0.01 * 2**world.rank)

    def build(its: World) -> Parts:
        return Parts(adapter(read), KINDS[kind][0](), ArrayData(its, (X,), global_batch=BATCH, shuffle=False))

    trainer, expected = Trainer(build, [StopAtStep(STEPS), hook]), Expected(world.size, kind)
    trainer.run()
    speeds = [100 / 2**rank for rank in range(world.size)]
    for step in range(STEPS):
        batch = X[BATCH * (step % 3) :][:BATCH]
        if expected.delay:
            expected.send((step - 1) % EVERY + 1)
        parts = parts_of(world.size, len(batch), speeds if step >= 2 else [1.0] * world.size)
        for rank, part in enumerate(parts):
            expected.inner(rank, batch[part])
        expected.step_ends()
        assert hook.parts[step] == parts[world.rank].stop - parts[world.rank].start
    expected.end()
    assert_close(flat(trainer.adapter), expected.common)
    assert_same_bits(world, *trainer.adapter.parameters().values())
    total = sum(world.allgather(read.seen), Counter())
    assert total == Counter(row.tobytes() for row in [*X, *X, *X[: 2 * BATCH]])
    trainer.close()
