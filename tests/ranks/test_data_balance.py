"""Balance gives parts in proportion to speed; streams that end early or late; batches that a thread reads ahead."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest

from models import mlp
from mpitrain import ArrayFunction, Balance, Hook, Parts, Step, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData, MapData, Prefetch, StreamData
from mpitrain.data.shares import split
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.optim import SGD

from .common import skip_alone
from .data_sources import COUNT, GLOBAL_BATCH, SEED, SOURCES, STEPS, Table, expected_steps, global_steps, stream
from .trainings import DECAY, MOMENTUM, RATE, Record, bare_numpy, builder, initial_parameters, ran, samples_of


class Pretend(Hook):
    """Balance on machines that take `seconds` a sample: no clock, so that what comes out is exact."""

    def __init__(self, balance: Balance, seconds: float) -> None:
        self.balance, self.seconds = balance, seconds
        self.parts: list[int] = []
        self.shared_out_at: list[int] = []

    def before_run(self, trainer: Trainer) -> None:
        self.balance.before_run(trainer)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        assert 0 < step.own_seconds <= step.seconds
        self.parts.append(step.own_samples)
        before = self.balance.samples_per_second
        self.balance.after_step(trainer, replace(step, own_seconds=step.own_samples * self.seconds))
        if self.balance.samples_per_second is not before:
            self.shared_out_at.append(step.number)

    def after_run(self, trainer: Trainer) -> None:
        self.balance.after_run(trainer)


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
def test_parts_are_in_proportion_and_the_mean_is_that_of_the_whole_batch(world: World, prefetch: bool) -> None:
    """Speeds 1, 1/2, 1/4 and so on: after 3 steps rank 0 has about twice the samples of rank 1."""

    def build(world: World) -> Parts:
        data = ArrayData(world, samples_of(171), global_batch=64, seed=3)
        adapter = ArrayFunction(
            mlp.loss_and_gradients, initial_parameters(), SGD(RATE, momentum=MOMENTUM, weight_decay=DECAY)
        )
        return Parts(adapter, Sync(), Prefetch(data) if prefetch else data)

    record = Record()
    hook = Pretend(Balance(3), 0.01 * 2**world.rank)
    trainer = ran(build, [StopAtStep(8), record, hook])
    speeds = [100 / 2**rank for rank in range(world.size)]
    assert hook.balance.samples_per_second == pytest.approx(speeds)
    assert hook.shared_out_at == [3]
    equal = [1.0] * world.size
    sizes = [64, 64, 43, 64, 64, 43, 64, 64]
    expected = [split(size, equal if number < 3 else speeds)[world.rank] for number, size in enumerate(sizes)]
    assert hook.parts == expected
    assert not trainer.times_own_work

    parameters, losses, _ = bare_numpy(171, 64, 8)
    assert [step.samples for step in record.steps] == sizes
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-12)
    for name, value in trainer.adapter.parameters().items():
        numpy.testing.assert_allclose(value, parameters[name], rtol=1e-12, atol=1e-14)
    assert trainer.data.state() == {"epoch": 2, "cursor": 128, "seed": 3, "shuffle": True, "num_samples": 171}


def test_speeds_are_measured_again_when_asked(world: World) -> None:
    def measured(every: int | None, ask_after: int | None) -> list[int]:
        balance = Balance(2, every=every)

        class Ask(Hook):
            def after_step(self, trainer: Trainer, step: Step) -> None:
                if step.number == ask_after:
                    balance.measure()

        hook = Pretend(balance, 0.1)
        Trainer(builder(14, 14), [StopAtStep(14), Ask(), hook]).run()
        assert balance.samples_per_second == pytest.approx([10.0] * world.size)
        return hook.shared_out_at

    assert measured(None, None) == [2]
    assert measured(4, None) == [2, 8, 14]  # asked for after 6 and 12, measured in the two steps after that
    assert measured(None, 9) == [2, 11]


def test_a_rank_without_samples_is_waited_for(world: World) -> None:
    """The measured step is an epoch's last one, with one sample: only rank 0 has one. The next step counts too."""
    skip_alone(world)
    hook = Pretend(Balance(1), 0.1)
    Trainer(builder(world.size * 2 + 1, world.size * 2), [StopAtStep(1)]).run()
    trainer = Trainer(builder(world.size * 2 + 1, world.size * 2), [StopAtStep(4), hook])
    trainer.step()
    trainer.run()
    assert hook.parts == [int(world.rank == 0), 2, int(world.rank == 0)]
    assert hook.shared_out_at == [3]


def test_balance_refuses(world: World) -> None:
    for make, text in ((lambda: Balance(0), "over 0 steps"), (lambda: Balance(every=0), "every 0 steps")):
        with pytest.raises(ConfigError, match=text):
            make()

    class Own:
        steps_per_epoch, epoch = 1, 0

    trainer = Trainer(lambda world: replace(builder(20, 10)(world), data=Own()), [StopAtStep(1), Balance()])
    with pytest.raises(ConfigError, match=r"Balance: Own has no method share_out") as caught:
        trainer.run()
    assert caught.value.known_everywhere


def test_a_stream_of_another_length(world: World) -> None:
    data = StreamData(world, stream, global_batch=10, num_samples=COUNT + 1)
    for _ in range(2):
        next(data)
    for _ in range(2):  # again, and again
        with pytest.raises(
            DataError, match=f"{world.name()}: the stream of epoch 0 has 23 samples, and num_samples=24"
        ):
            next(data)
    even = StreamData(world, lambda _: iter(range(20)), global_batch=10, num_samples=30)
    for _ in range(2):
        next(even)
    with pytest.raises(DataError, match="the stream of epoch 0 has 20 samples, and num_samples=30"):
        next(even)


def test_a_stream_without_samples(world: World) -> None:
    for of_epoch in (0, 1):
        data = StreamData(
            world, lambda epoch, empty=of_epoch: iter([] if epoch == empty else [1.0] * 8), global_batch=8
        )
        for _ in range(of_epoch):
            next(data)
        with pytest.raises(DataError, match=f"{world.name()}: the stream of epoch {of_epoch} has no samples"):
            next(data)
    with pytest.raises(DataError, match="the number of samples of this stream is unknown; pass num_samples="):
        _ = data.steps_per_epoch


def test_a_stream_that_fails_does_not_seem_to_end(world: World) -> None:
    failures = [1]

    def flaky(epoch: int) -> Iterator[Any]:
        for place, sample in enumerate(stream(epoch)):
            if place == 12 and failures:
                failures.pop()
                raise OSError("the share is gone")
            yield sample

    data = StreamData(world, flaky, global_batch=GLOBAL_BATCH, seed=SEED)
    expected = expected_steps("stream", False)
    assert global_steps(world, data, 1) == expected[:1]
    with pytest.raises(OSError, match="the share is gone"):
        next(data)
    assert global_steps(world, data, STEPS - 1) == expected[1:]


def test_a_stream_that_has_become_shorter(world: World) -> None:
    data = StreamData(world, stream, global_batch=GLOBAL_BATCH)
    data.restore({"epoch": 1, "cursor": 30, "seed": 0, "num_samples": None})
    with pytest.raises(DataError, match="the stream of epoch 1 has 23 samples, but training has passed 30 of them"):
        next(data)
    for bad, text in (({"seed": 1}, "seed=1, this run's 0"), ({"cursor": -1}, "epoch=1 cursor=-1; both begin at 0")):
        with pytest.raises(CheckpointError, match=text):
            data.restore({"epoch": 1, "cursor": 9, "seed": 0, "num_samples": None} | bad)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpitrain prefetch"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("batches", [1, 3])
def test_no_more_is_read_ahead_than_was_asked_for(world: World, batches: int) -> None:
    gc.collect()
    assert not readers()
    inner = MapData(world, list(range(100)), global_batch=world.size)
    data = Prefetch(inner, batches=batches)
    assert not readers()  # nothing is read before it is wanted
    for steps in range(1, 4):
        next(data)
        until(lambda steps=steps: inner.cursor == (steps + batches) * world.size)
        time.sleep(0.02)  # in which it could continue
        assert inner.cursor == (steps + batches) * world.size
        assert data.state()["cursor"] == steps * world.size
    data.close()
    assert not readers()
    assert inner.cursor == 3 * world.size


def test_the_thread_ends_with_the_object(world: World) -> None:
    data = Prefetch(SOURCES["arrays"](world, global_batch=GLOBAL_BATCH))
    next(data)
    assert len(readers()) == 1
    del data
    gc.collect()
    assert not readers()


def test_an_error_in_the_thread_comes_with_its_batch(world: World) -> None:
    """The error does not come earlier, and the batch can be tried again."""
    failures = [1]

    class Flaky(Table):
        def __getitem__(self, number: Any) -> Any:
            if data_inner.cursor == 2 * GLOBAL_BATCH and failures:
                failures.pop()
                raise OSError(f"sample {number} cannot be read")
            return super().__getitem__(number)

    data_inner = MapData(world, Flaky(False), global_batch=GLOBAL_BATCH, seed=SEED)
    data = Prefetch(data_inner, batches=4)
    expected = expected_steps("items", False)
    assert global_steps(world, data, 2) == expected[:2]
    state = data.state()
    with pytest.raises(OSError, match=r"sample \d+ cannot be read"):
        next(data)
    assert not readers()
    assert data.state() == state
    assert global_steps(world, data, STEPS - 2) == expected[2:]


@pytest.mark.parametrize("batches", [0, -1, 1.0, True], ids=repr)
def test_batches_ahead_start_at_1(world: World, batches: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"batches={batches!r}; it must be an int of at least 1")):
        Prefetch(SOURCES["arrays"](world, global_batch=GLOBAL_BATCH), batches=batches)
