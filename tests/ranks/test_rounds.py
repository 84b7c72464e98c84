"""LocalSGD, DiLoCo and StreamingDiLoCo: what every rank has, also within a round, and what checkpoints keep of it.

The expected values come from float64 loops over all ranks' samples, without a strategy.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain import (
    ArrayFunction,
    Checkpoint,
    CompareReplicas,
    DiLoCo,
    Hook,
    LocalSGD,
    LossScale,
    Sgd,
    Step,
    StopAtStep,
    StreamingDiLoCo,
    Sync,
    Trainer,
    World,
)
from mpitrain.errors import CheckpointError, ConfigError, MismatchError, NonFiniteError
from mpitrain.job.worlds import make_world
from mpitrain.strategies import Strategy
from mpitrain.training import checkpoint
from mpitrain.training.checkpoint.parts import add_up

from .common import assert_same_bits, error_on_all, skip_alone
from .test_strategies import MOMENTUM, RATE, WIDTH, adapter, count_of, one_step, quadratic, samples, train, values
from .trainings import Record, bits, builder

EVERY, STEPS = 3, 8  # two rounds, and two steps of the third
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


def streaming(fragments: int, delay: int, alpha: float) -> StreamingDiLoCo:
    outer = Sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    return StreamingDiLoCo(EVERY, fragments=fragments, delay=delay, alpha=alpha, outer=outer)


# By name: a strategy; its fragments, delay and alpha.
KINDS: dict[str, tuple[Callable[[], Strategy], int, int, float]] = {
    "local_sgd": (lambda: LocalSGD(EVERY), 1, 0, 0.0),
    "diloco": (lambda: DiLoCo(EVERY, outer=Sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)), 1, 0, 0.0),
    "parts": (lambda: streaming(4, 0, 0.0), 4, 0, 0.0),
    "one late": (lambda: streaming(1, 1, 0.25), 1, 1, 0.25),
    "parts, late": (lambda: streaming(3, 2, 0.5), 3, 2, 0.5),
    "parts, as late as possible": (lambda: streaming(2, EVERY, 0.0), 2, EVERY, 0.0),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def flat(model: ArrayFunction) -> numpy.ndarray:
    return numpy.concatenate([value.ravel() for value in values(model)])


class Expected:
    """What all ranks have, by a loop over their samples. Vectors have the elements of w and then those of v."""

    def __init__(self, size: int, kind: str) -> None:
        _, fragments, self.delay, self.alpha = KINDS[kind]
        self.size, self.is_mean = size, kind == "local_sgd"
        self.common = flat(adapter())
        self.outer, self.steps = 0 * self.common, 0
        self.own = [self.common.copy() for _ in range(size)]
        self.speeds = [0 * self.common for _ in range(size)]
        count = len(self.common)
        self.parts = [slice(count * one // fragments, count * (one + 1) // fragments) for one in range(fragments)]
        self.offsets = [math.ceil(EVERY * one / fragments) for one in range(1, fragments + 1)]
        self.counts = [[0] * size for _ in range(fragments)]
        # Of each fragment that is under way: when it arrives, the mean, and the samples by rank.
        self.sent: list[tuple[int, numpy.ndarray, list[int]] | None] = [None] * fragments

    def step(self) -> float:
        """Make a step. Return its mean loss."""
        if self.delay:
            self.send((self.steps - 1) % EVERY + 1)
        total, number = 0.0, 0
        for rank in range(self.size):
            x = samples(rank, self.steps, count_of(rank, self.steps, self.size))
            total, number = total + self.inner(rank, x), number + len(x)
        self.step_ends()
        return total / number

    def step_ends(self) -> None:
        self.steps += 1
        if not self.delay:
            self.send((self.steps - 1) % EVERY + 1)
        for part, sent in enumerate(self.sent):
            if sent and sent[0] == self.steps:
                self.arrive(part, self.alpha)

    def inner(self, rank: int, x: numpy.ndarray) -> float:
        """Make an inner step of a rank. Return the sum of its losses."""
        own = self.own[rank]
        w, v = own[:WIDTH], own[WIDTH:]
        gradient = numpy.concatenate([w - x.mean(axis=0), v - x.mean()]) if len(x) else 0 * own
        self.speeds[rank] = MOMENTUM * self.speeds[rank] + gradient
        self.own[rank] = own - RATE / (1 + self.steps) * self.speeds[rank]
        for counts in self.counts:
            counts[rank] += len(x)
        return float(((w - x) ** 2).sum() / 2)

    def send(self, steps: int | None) -> None:
        """Send the fragments that are due, or all."""
        for part, where in enumerate(self.parts):
            counts = self.counts[part]
            if steps in (None, self.offsets[part]) and sum(counts):
                gone = [count * (self.common - own)[where] for count, own in zip(counts, self.own, strict=True)]
                self.sent[part] = self.steps + self.delay, sum(gone) / sum(counts), counts
                self.counts[part] = [0] * len(counts)

    def arrive(self, part: int, alpha: float) -> None:
        sent, where = self.sent[part], self.parts[part]
        assert sent
        mean, self.sent[part] = sent[1], None
        if self.is_mean:
            self.common[where] -= mean
        else:
            self.outer[where] = OUTER_MOMENTUM * self.outer[where] + mean
            self.common[where] -= OUTER_RATE * (mean + OUTER_MOMENTUM * self.outer[where])
        for own in self.own:
            own[where] = alpha * own[where] + (1 - alpha) * self.common[where]

    def take_back(self) -> None:
        """Forget what is under way."""
        for part, sent in enumerate(self.sent):
            if sent:
                self.counts[part] = [one + other for one, other in zip(self.counts[part], sent[2], strict=True)]
                self.sent[part] = None

    def end(self) -> None:
        """Send all that the ranks have gone since each fragment has arrived last."""
        self.take_back()
        self.send(None)
        for part, sent in enumerate(self.sent):
            if sent:
                self.arrive(part, 0.0)

    def add_rank(self) -> None:
        """One more rank begins with the common parameters, and the optimizer of rank 0; the others stay as they are."""
        self.take_back()
        for counts in self.counts:
            counts.append(0)
        self.own.append(self.common.copy())
        self.speeds.append(self.speeds[0].copy())


def assert_close(found: numpy.ndarray, expected: numpy.ndarray) -> None:
    numpy.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


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
@pytest.mark.parametrize("done", [4, 6])
def test_one_rank_goes_on_from_all(world: World, kind: str, done: int) -> None:
    """In the middle of a round (4 steps) and at its end: nothing that a rank has learned is lost."""
    from mpi4py import MPI

    skip_alone(world)
    strategy, model, expected = KINDS[kind][0](), adapter(), Expected(world.size, kind)
    strategy.begin(world, model)
    train(world, strategy, model, range(done))
    for _ in range(done):
        expected.step()
    total: dict[str, Any] = {}
    for part in world.allgather(strategy.own_state()):
        add_up(total, part)
    state, saved = world.broadcast((strategy.state(), model.state()))
    strategy.close()

    alone = make_world(MPI.COMM_SELF)
    again, resumed = KINDS[kind][0](), adapter(seed=99)
    again.begin(alone, resumed)
    again.restore(state)
    resumed.restore(saved)
    again.restore_own(total)
    expected.add_rank()
    for step in range(done, done + 2 * EVERY):
        x = samples(9, step, 2 + step)
        one_step(again, resumed, x)
        if expected.delay:
            expected.send((step - 1) % EVERY + 1)
        expected.inner(-1, x)
        expected.step_ends()
        assert_close(flat(resumed), expected.own[-1])
    again.end_run()
    expected.end()
    assert_close(flat(resumed), expected.common)
    again.close()
    alone.free()


def forget_last(world: World, folder: Path, step: int) -> None:
    """Remove the checkpoint of the end of a run. The one before is from the middle of a round."""
    world.barrier()
    if world.is_root:
        for path in folder.glob(f"step-{step:08d}*"):
            shutil.rmtree(path)
    world.barrier()


@kinds
def test_a_run_that_is_resumed_within_a_round(world: World, shared: Path, kind: str) -> None:
    """A checkpoint goes on as if the run had not ended. A run ends with an outer step, which its hooks see."""
    build = builder(45, 14, strategy=KINDS[kind][0])
    whole = Record()
    uninterrupted = Trainer(build, [StopAtStep(10), whole])
    uninterrupted.run()
    first = Trainer(build, [StopAtStep(7), Checkpoint(shared, steps=5, keep=2), CompareReplicas(1)])
    first.run()
    assert_same_bits(world, *first.adapter.parameters().values())
    if world.is_root:
        last = checkpoint.load(shared / "step-00000007")
        assert "round" not in last.get("strategy", {})
        for name, value in first.adapter.parameters().items():
            assert last["adapter"]["parameters"][name].tobytes() == value.tobytes()
    forget_last(world, shared, 7)
    record = Record()
    resumed = Trainer(build, [StopAtStep(10), Checkpoint(shared, steps=100), record])
    resumed.run()
    assert [step.loss for step in record.steps] == [step.loss for step in whole.steps[5:]]
    assert bits(resumed) == bits(uninterrupted)


def test_a_run_that_a_hook_ends(world: World, shared: Path) -> None:
    """The end is known only after the last step. The last checkpoint has the common parameters, too."""

    class Enough(Hook):
        ends_run = True

        def after_step(self, trainer: Trainer, step: Step) -> None:
            if step.number == 5:
                trainer.last_step = 5

    trainer = Trainer(builder(45, 14, strategy=lambda: DiLoCo(3)), [Checkpoint(shared, steps=100), Enough()])
    trainer.run()
    world.barrier()
    last = checkpoint.load(shared / "step-00000005")
    assert "round" not in last["strategy"]
    for name, value in trainer.adapter.parameters().items():
        assert last["adapter"]["parameters"][name].tobytes() == value.tobytes()
    assert_same_bits(world, *trainer.adapter.parameters().values())


def test_outer_optimizers_that_differ(world: World) -> None:
    skip_alone(world)
    rate = 0.5 if world.rank == world.size - 1 else 0.7
    text = error_on_all(world, MismatchError, lambda: DiLoCo(3, outer=Sgd(rate)).begin(world, adapter()))
    assert "outer optimizer Sgd" in text
    assert "0.5" in text


def test_sync_goes_on_from_the_end_of_a_round(world: World, shared: Path) -> None:
    def trainer(strategy: Callable[[], Strategy], steps: int, last: int) -> Trainer:
        return Trainer(
            builder(45, 14, strategy=strategy), [StopAtStep(last), Checkpoint(shared / str(steps), steps=100)]
        )

    trainer(lambda: DiLoCo(3), 6, 6).run()
    Trainer(builder(45, 14, strategy=lambda: DiLoCo(3)), [StopAtStep(6), Checkpoint(shared / "5", steps=5)]).run()
    forget_last(world, shared / "5", 6)
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
        for name, value in parameters.items():
            huge = 1.5e308 if world.rank == odd and name == "w" else 1.0
            on_gradient(name, numpy.full_like(value, huge))
        return 0.0

    strategy, model = DiLoCo(2, outer=Sgd(1.0)), adapter(function, momentum=0.9)
    strategy.begin(world, model)
    batch = samples(world.rank, 0, 3)
    one_step(strategy, model, batch)
    before = [value.copy() for value in strategy.state()["round"]["parameters"].values()]
    with numpy.errstate(over="ignore", invalid="ignore"):
        text = error_on_all(world, NonFiniteError, lambda: one_step(strategy, model, batch))
    assert f"{world.name(odd)}: w has become NaN or infinity in the steps of this round" in text
    after = list(strategy.state()["round"]["parameters"].values())
    assert [one.tobytes() for one in before] == [one.tobytes() for one in after]
    strategy.close()


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("given", [{"sync_every": 0}, {"sync_every": True}, {"sync_every": 2.0}, {"warm_up": -1}])
def test_numbers_that_are_refused(kind: Any, given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=re.escape(f"{kind.__name__}: {name}={value!r}; it must be an int of at le")):
        kind(**given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fragments": 0}, "fragments=0; it must be an int of at least 1"),
        ({"delay": 4}, "delay=4; it must be an int from 0 to sync_every=3, as a fragment must arrive before"),
        ({"delay": -1}, "delay=-1; it must be an int from 0"),
        ({"alpha": 1.0}, "alpha=1.0; it must be at least 0 and below 1"),
        ({"alpha": -0.5}, "alpha=-0.5; it must be at least 0"),
        ({"delay": 0}, "alpha=0.5; it must be at least 0 and below 1, and 0 without a delay"),
    ],
)
def test_fragments_that_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"StreamingDiLoCo: {text}")):
        StreamingDiLoCo(3, **given)


def test_more_fragments_than_elements(world: World) -> None:
    model = adapter()
    StreamingDiLoCo(30, fragments=13).begin(world, model)
    text = error_on_all(world, ConfigError, lambda: StreamingDiLoCo(30, fragments=14).begin(world, model))
    assert text == "fragments=14 of a model with 13 trained elements; allowed are 1 to 13"


def test_ranks_that_differ(world: World) -> None:
    skip_alone(world)
    odd = world.rank == world.size - 1
    text = error_on_all(world, MismatchError, lambda: LocalSGD(3 if odd else 4).begin(world, adapter()))
    assert f"{world.name(world.size - 1)}: LocalSGD(sync_every=3, warm_up=0, " in text


def test_a_longer_round_is_not_gone_on_from_by_a_shorter_one(world: World) -> None:
    strategy = DiLoCo(5)
    strategy.begin(world, model := adapter())
    train(world, strategy, model, range(4))
    shorter = DiLoCo(4)
    shorter.begin(world, adapter())
    with pytest.raises(CheckpointError, match=r"after 4 steps of a round, .* sync_every=4 .* sync_every above 4"):
        shorter.restore(strategy.state())
    strategy.close()
    shorter.close()


@kinds
def test_one_rank_hands_its_round_to_all(world: World, shared: Path, kind: str) -> None:
    """What one rank has learned in a round counts in the next outer step of any number of ranks."""
    from mpi4py import MPI

    alone = make_world(MPI.COMM_SELF)
    strategy, model, expected = KINDS[kind][0](), adapter(), Expected(1, kind)
    strategy.begin(alone, model)
    for step in range(4):
        one_step(strategy, model, samples(0, step, count_of(0, step, 1)))
        expected.step()
    own, state, saved = strategy.own_state(), strategy.state(), model.state()
    strategy.close()

    again, resumed = KINDS[kind][0](), adapter(seed=3)
    again.begin(world, resumed)
    again.restore(state)
    resumed.restore(saved)
    if kind == "local_sgd":  # one rank has begun no round, and all begin with what it has
        assert own == {}
        assert_close(flat(resumed), expected.own[0])
    else:
        total: dict[str, Any] = {}
        add_up(total, own)
        again.restore_own(total if world.is_root else {})
        assert_close(flat(resumed), expected.common)
        again.end_run()
        expected.end()
        assert_close(flat(resumed), expected.common)
        assert_same_bits(world, *values(resumed))
    again.close()
    alone.free()


def test_steps_that_are_skipped_leave_no_difference(world: World) -> None:
    """The loss scale skips all steps of a flight. The ranks are apart after it, and meet at the end of the run."""
    is_infinite = False

    def scaled(parameters: Any, batch: Any, on_gradient: Any, loss_scale: float) -> float:
        def hand_in(name: str, gradient: Any) -> None:
            on_gradient(name, gradient * (numpy.inf if is_infinite else loss_scale))

        return quadratic(parameters, batch, hand_in)

    parameters = {"w": numpy.zeros(WIDTH), "v": numpy.zeros((2, 3))}
    model = ArrayFunction(scaled, parameters, Sgd(RATE), loss_scale=LossScale())
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


def test_a_flight_is_taken_back_by_another_schedule(world: World) -> None:
    """With another delay, what is under way in a checkpoint is sent anew: nothing is lost."""
    strategy, model, expected = streaming(1, EVERY, 0.0), adapter(), Expected(world.size, "parts, late")
    strategy.begin(world, model)
    train(world, strategy, model, range(4))
    own, state, saved = strategy.own_state(), strategy.state(), model.state()
    gone = flat(model)
    again, resumed = streaming(1, 1, 0.0), adapter(seed=3)
    again.begin(world, resumed)
    again.restore(state)
    resumed.restore(saved)
    total: dict[str, Any] = {}
    if world.size > 1 or "local" in own:
        add_up(total, own)
    again.restore_own(total)
    assert_close(flat(resumed), expected.common)  # those of the beginning
    counts = [sum(count_of(rank, step, world.size) for step in range(4)) for rank in range(world.size)]
    distances = [count * (expected.common - one) for count, one in zip(counts, world.allgather(gone), strict=True)]
    mean = sum(distances) / sum(counts)
    again.end_run()
    assert_close(flat(resumed), expected.common - OUTER_RATE * (1 + OUTER_MOMENTUM) * mean)
    strategy.close()
    again.close()
