"""LocalSGD and DiLoCo: the values of every rank, in the middle of a round too, and what checkpoints keep of a round.

The expected values come from float64 loops over all ranks' samples, without a strategy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain import Checkpoint, CompareReplicas, DiLoCo, LocalSGD, Sgd, StopAtStep, Sync, Trainer, World
from mpitrain.errors import CheckpointError, ConfigError, MismatchError, NonFiniteError
from mpitrain.job.worlds import make_world
from mpitrain.strategies import Strategy
from mpitrain.training.checkpoint.parts import add_up

from .common import assert_same_bits, error_on_all, skip_alone
from .test_strategies import MOMENTUM, RATE, adapter, count_of, one_step, quadratic, samples, train, values
from .trainings import Record, bits, builder

EVERY, STEPS = 3, 8  # two rounds, and two steps of the third
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
KINDS: dict[str, Callable[[], Strategy]] = {
    "local_sgd": lambda: LocalSGD(EVERY),
    "diloco": lambda: DiLoCo(EVERY, outer=Sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)),
}
Vectors = list[numpy.ndarray]


class Expected:
    """What all ranks have, by a loop over their samples."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind
        self.common: Vectors = [value.copy() for value in values(adapter())]
        self.outer: Vectors = [numpy.zeros_like(value) for value in self.common]
        self.speeds = [[numpy.zeros_like(value) for value in self.common] for _ in range(size)]
        self.steps = 0
        self.begin()

    def begin(self) -> None:
        self.own = [[value.copy() for value in self.common] for _ in range(self.size)]
        self.counts = [0] * self.size

    def step(self) -> float:
        """Make a step. Return its mean loss."""
        total, number = 0.0, 0
        for rank in range(self.size):
            x = samples(rank, self.steps, count_of(rank, self.steps, self.size))
            w, v = self.own[rank]
            gradients = (w - x.mean(axis=0), v - x.mean()) if len(x) else (0 * w, 0 * v)
            total, number = total + ((w - x) ** 2).sum() / 2, number + len(x)
            pairs = zip(self.speeds[rank], gradients, strict=True)
            self.speeds[rank] = [MOMENTUM * speed + gradient for speed, gradient in pairs]
            rate = RATE / (1 + self.steps)
            self.own[rank] = [one - rate * speed for one, speed in zip((w, v), self.speeds[rank], strict=True)]
            self.counts[rank] += len(x)
        self.steps += 1
        if self.steps % EVERY == 0:
            self.meet()
        return total / number

    def meet(self) -> None:
        for index, common in enumerate(self.common):
            gone = [count * (common - own[index]) for count, own in zip(self.counts, self.own, strict=True)]
            mean = sum(gone) / sum(self.counts)
            if self.kind == "local_sgd":
                self.common[index] = common - mean
            else:
                self.outer[index] = OUTER_MOMENTUM * self.outer[index] + mean
                self.common[index] = common - OUTER_RATE * (mean + OUTER_MOMENTUM * self.outer[index])
        self.begin()


def assert_close(found: Vectors, expected: Vectors) -> None:
    for one, other in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_its_own_values_and_all_meet(world: World, kind: str) -> None:
    strategy, model, expected = KINDS[kind](), adapter(seed=world.rank), Expected(world.size, kind)
    strategy.begin(world, model)
    for step in range(STEPS):
        loss = expected.step()
        assert train(world, strategy, model, range(step, step + 1)) == pytest.approx([loss], rel=1e-12)
        assert_close(values(model), expected.own[world.rank])
        if (step + 1) % EVERY == 0:
            assert_same_bits(world, *values(model))
    strategy.end_run()
    expected.meet()
    assert_close(values(model), expected.common)
    assert_same_bits(world, *values(model))
    strategy.end_run()  # there is nothing to end
    assert_close(values(model), expected.common)
    strategy.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("done", [4, 6])
def test_one_rank_goes_on_from_all(world: World, kind: str, done: int) -> None:
    """In the middle of a round (4 steps) and at its end: nothing that a rank has learned is lost."""
    from mpi4py import MPI

    skip_alone(world)
    strategy, model, expected = KINDS[kind](), adapter(), Expected(world.size, kind)
    strategy.begin(world, model)
    train(world, strategy, model, range(done))
    for _ in range(done):
        expected.step()
    state, saved = world.broadcast((strategy.state(), model.state()))
    total: dict[str, Any] = {}
    for part in world.allgather(strategy.own_state()):
        add_up(total, part)
    strategy.close()

    alone = make_world(MPI.COMM_SELF)
    again, resumed = KINDS[kind](), adapter(seed=99)
    again.begin(alone, resumed)
    again.restore(state)
    resumed.restore(saved)
    again.restore_own(total)
    assert_close(values(resumed), expected.common)
    # One more rank joins in, so to say: its samples count beside those before the resume.
    expected.own.append([value.copy() for value in expected.common])
    speed = [value.copy() for value in expected.speeds[0]]
    count = 0
    for step in range(done, EVERY * (done // EVERY + 1)):
        x = samples(9, step, 2 + step)
        one_step(again, resumed, x)
        w, v = expected.own[-1]
        speed = [MOMENTUM * old + new for old, new in zip(speed, (w - x.mean(axis=0), v - x.mean()), strict=True)]
        expected.own[-1] = [one - RATE / (1 + step) * new for one, new in zip((w, v), speed, strict=True)]
        count += len(x)
    expected.counts.append(count)
    if kind == "local_sgd" and done % EVERY == 0:
        expected.common = expected.own[-1]  # one rank that begins a round trains as if by itself
    else:
        expected.meet()
    assert_close(values(resumed), expected.common)
    again.close()
    alone.free()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_the_middle_of_a_round(world: World, shared: Path, kind: str) -> None:
    """A run ends with an outer step. Its last checkpoint goes on as if the run had not ended."""
    build = builder(45, 14, strategy=KINDS[kind])
    whole = Record()
    uninterrupted = Trainer(build, [StopAtStep(10), whole])
    uninterrupted.run()
    first = Trainer(build, [StopAtStep(5), Checkpoint(shared, steps=5), CompareReplicas(1)])
    first.run()
    assert_same_bits(world, *first.adapter.parameters().values())
    record = Record()
    resumed = Trainer(build, [StopAtStep(10), Checkpoint(shared, steps=100), record])
    resumed.run()
    assert [step.loss for step in record.steps] == [step.loss for step in whole.steps[5:]]
    assert bits(resumed) == bits(uninterrupted)


def test_sync_goes_on_from_the_end_of_a_round(world: World, shared: Path) -> None:
    def trainer(strategy: Callable[[], Strategy], steps: int, last: int) -> Trainer:
        return Trainer(
            builder(45, 14, strategy=strategy), [StopAtStep(last), Checkpoint(shared / str(steps), steps=100)]
        )

    for steps in (6, 5):
        trainer(lambda: DiLoCo(3), steps, steps).run()
    one = trainer(Sync, 6, 8)
    one.run()
    assert one.step_number == 8
    assert_same_bits(world, *one.adapter.parameters().values())
    with pytest.raises(CheckpointError, match=r"after 2 steps of a round .* a multiple of sync_every"):
        trainer(Sync, 5, 8).run()


def test_local_sgd_goes_on_from_sync(world: World, shared: Path) -> None:
    Trainer(builder(45, 14), [StopAtStep(4), Checkpoint(shared, steps=100)]).run()
    one = Trainer(builder(45, 14, strategy=lambda: LocalSGD(4)), [StopAtStep(8), Checkpoint(shared, steps=100)])
    one.run()
    assert one.step_number == 8
    assert_same_bits(world, *one.adapter.parameters().values())


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


def test_parameters_that_are_not_finite_reach_no_other_rank(world: World) -> None:
    """Finite gradients make infinite parameters on one rank. The outer step names it and changes nothing."""
    odd = world.size - 1

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        factor = 1e308 if world.rank == odd else 1.0
        return quadratic(parameters, batch, lambda name, gradient: on_gradient(name, gradient.clip(-1, 1) * factor))

    strategy, model = DiLoCo(2, outer=Sgd(1.0)), adapter(function, momentum=0.9)
    strategy.begin(world, model)
    batch = samples(world.rank, 0, 3)
    with numpy.errstate(over="ignore", invalid="ignore"):
        one_step(strategy, model, batch)
        before = [value.copy() for value in strategy.state()["round"]["parameters"].values()]
        text = error_on_all(world, NonFiniteError, lambda: [one_step(strategy, model, batch) for _ in range(40)])
    assert world.name(odd) in text
    after = list(strategy.state()["round"]["parameters"].values())
    assert [one.tobytes() for one in before] == [one.tobytes() for one in after]


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("given", [{"sync_every": 0}, {"sync_every": True}, {"sync_every": 2.0}, {"warm_up": -1}])
def test_numbers_that_are_refused(kind: Any, given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=re.escape(f"{kind.__name__}: {name}={value!r}; it must be an int of at le")):
        kind(**given)


def test_ranks_that_differ(world: World) -> None:
    skip_alone(world)
    odd = world.rank == world.size - 1
    text = error_on_all(world, MismatchError, lambda: LocalSGD(3 if odd else 4).begin(world, adapter()))
    assert f"{world.name(world.size - 1)}: LocalSGD(sync_every=3, warm_up=0)" in text


def test_a_longer_round_is_not_gone_on_from_by_a_shorter_one(world: World) -> None:
    strategy = DiLoCo(5)
    strategy.begin(world, model := adapter())
    train(world, strategy, model, range(4))
    shorter = DiLoCo(4)
    shorter.begin(world, adapter())
    with pytest.raises(CheckpointError, match=r"after 4 steps of a round, and sync_every=4 .* sync_every above 4"):
        shorter.restore(strategy.state())
    strategy.close()
    shorter.close()
