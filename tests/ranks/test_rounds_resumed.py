"""What checkpoints keep of a round, and who can continue from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain import Checkpoint, CompareReplicas, DiLoCo, Hook, LocalSGD, Step, StopAtStep, Sync, Trainer, World
from mpitrain import state as checkpoint
from mpitrain.errors import CheckpointError
from mpitrain.job.worlds import make_world
from mpitrain.optim import SGD
from mpitrain.state.resume import add_up
from mpitrain.strategies import Strategy

from .checkpoints import flip_a_bit
from .common import added_up, assert_same_bits, skip_alone
from .rounds_by_hand import EVERY, KINDS, OUTER_MOMENTUM, OUTER_RATE, Expected, assert_close, flat, kinds, streaming
from .test_strategies import adapter, count_of, one_step, samples, train, values
from .trainings import Record, bits, builder, ran


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
    total = added_up(world.allgather(strategy.own_state()))
    state, saved = world.broadcast_object((strategy.state(), model.state()))
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
    """A checkpoint continues as if the run had not ended. A run ends with an outer step, which its hooks see."""
    build = builder(45, 14, strategy=KINDS[kind][0])
    whole = Record()
    uninterrupted = ran(build, [StopAtStep(10), whole])
    first = ran(build, [StopAtStep(7), Checkpoint(shared, steps=5, keep=2), CompareReplicas(1)])
    assert_same_bits(world, *first.adapter.parameters().values())
    if world.is_root:
        last = checkpoint.load(shared / "step-00000007")
        assert "round" not in last.get("strategy", {})
        for name, value in first.adapter.parameters().items():
            assert last["adapter"]["parameters"][name].tobytes() == value.tobytes()
    forget_last(world, shared, 7)
    record = Record()
    resumed = ran(build, [StopAtStep(10), Checkpoint(shared, steps=100), record])
    assert [step.loss for step in record.steps] == [step.loss for step in whole.steps[5:]]
    assert bits(resumed) == bits(uninterrupted)


def test_a_run_that_a_hook_ends(world: World, shared: Path) -> None:
    """The end is known only after the last step. The last checkpoint has the common parameters, too."""

    class Enough(Hook):
        ends_run = True

        def after_step(self, trainer: Trainer, step: Step) -> None:
            if step.number == 5:
                trainer.last_step = 5

    trainer = ran(builder(45, 14, strategy=lambda: DiLoCo(3)), [Checkpoint(shared, steps=100), Enough()])
    world.barrier()
    last = checkpoint.load(shared / "step-00000005")
    assert "round" not in last["strategy"]
    for name, value in trainer.adapter.parameters().items():
        assert last["adapter"]["parameters"][name].tobytes() == value.tobytes()
    assert_same_bits(world, *trainer.adapter.parameters().values())


def test_sync_goes_on_from_the_end_of_a_round_and_rounds_from_sync(world: World, shared: Path) -> None:
    def run(strategy: Callable[[], Strategy], folder: str, last: int, steps: int = 100) -> None:
        hooks = [StopAtStep(last), Checkpoint(shared / folder, steps=steps)]
        trainer = ran(builder(45, 14, strategy=strategy), hooks)
        assert trainer.step_number == last
        assert_same_bits(world, *trainer.adapter.parameters().values())

    run(lambda: DiLoCo(3), "whole", 6)
    run(Sync, "whole", 8)
    run(lambda: LocalSGD(4), "whole", 10)
    run(lambda: DiLoCo(3), "cut", 6, steps=5)
    forget_last(world, shared / "cut", 6)
    with pytest.raises(CheckpointError, match=r"after 2 steps of a round .* a multiple of sync_every"):
        run(Sync, "cut", 8)


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
        total = added_up([own])
        again.restore_own(total if world.is_root else {})
        assert_close(flat(resumed), expected.common)
        again.end_run()
        expected.end()
        assert_close(flat(resumed), expected.common)
        assert_same_bits(world, *values(resumed))
    again.close()
    alone.free()


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


@pytest.mark.parametrize("last", [4, pytest.param(8, marks=pytest.mark.nightly)])
@kinds
def test_parts_that_nobody_can_read(
    world: World, shared: Path, capfd: pytest.CaptureFixture[str], kind: str, last: int
) -> None:
    """The steps since the last outer step are lost, and nothing else: the training continues from the common values."""
    skip_alone(world)  # one rank alone need not have a part
    build = builder(45, 14, strategy=KINDS[kind][0])
    Trainer(build, [StopAtStep(6), Checkpoint(shared, steps=4)]).run()
    forget_last(world, shared, 6)
    if world.is_root:
        for path in shared.glob("step-00000004.part-*"):
            flip_a_bit(path)
    world.barrier()
    common = checkpoint.load(shared / "step-00000004")["strategy"]["round"]["parameters"]
    capfd.readouterr()
    again = ran(build, [StopAtStep(last), Checkpoint(shared, steps=100)])
    out = capfd.readouterr().out
    if world.is_root:
        assert f"part-{world.size - 1}-of-{world.size}/tensors.safetensors is damaged" in out
        assert "its steps since the round began" in out
    assert again.step_number == last
    assert_same_bits(world, *again.adapter.parameters().values())
    for name, value in again.adapter.parameters().items():
        is_unchanged = value.tobytes() == common[name].tobytes()
        assert is_unchanged is (last == 4)


def test_what_a_codec_left_out_waits_for_an_outer_step_without_a_codec(world: World) -> None:
    """It is in the state of each rank, also of a single one, until it is in the mean; the place stays the same."""
    after: list[numpy.ndarray] = []
    carried: dict[str, numpy.ndarray] = {}
    for carries in (False, True):
        strategy, model = DiLoCo(EVERY, outer=SGD(1.0)), adapter()
        strategy.begin(world, model)
        (fragment,) = strategy._outer_steps.fragments
        place = strategy._outer_steps.place
        if carries:
            random = numpy.random.default_rng(world.rank)
            for parameter in fragment._reducer.layout.parameters:
                left = random.integers(1, 9, parameter.shape).astype(parameter.dtype)
                carried[f"round/0/left out/{parameter.name}"] = left
            strategy.restore_own({"carried": carried})
            own = strategy.own_state()
            assert own["place"] == place
            assert own["carried"].keys() == carried.keys()
            for name, left in carried.items():
                assert own["carried"][name].tobytes() == left.tobytes()
        train(world, strategy, model, range(EVERY))
        assert not strategy.own_state().get("carried")
        after.append(flat(model))
        strategy.close()
    total = numpy.concatenate([world.sum(left).ravel() for left in carried.values()])
    numpy.testing.assert_allclose(after[0] - after[1], total, rtol=1e-12, atol=1e-12)
