"""Data on any number of ranks is data on one: the same samples in the same steps, changed in the same way."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from models import mlp
from mpitrain import (
    Accumulate,
    ArrayData,
    ArrayFunction,
    Balance,
    Hook,
    MapData,
    Parts,
    Prefetch,
    Sgd,
    Step,
    StopAtStep,
    StreamData,
    Sync,
    Trainer,
    World,
)
from mpitrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GradientError,
    MismatchError,
    MissingGradientError,
    MpitrainError,
)
from mpitrain.training.data.order import permuted
from mpitrain.training.data.samples import random_of
from mpitrain.training.data.shares import split

from .common import assert_same_bits, error_on_all, skip_alone
from .test_training import (
    DECAY,
    MOMENTUM,
    RATE,
    Record,
    bare_numpy,
    bits,
    builder,
    initial_parameters,
    samples_of,
)

COUNT, GLOBAL_BATCH, SEED = 23, 9, 6  # an epoch's last batch has 5 samples: fewer than the ranks, from 6 on
STEPS = 7  # two epochs and a step


def noisy(sample: Any, random: numpy.random.Generator) -> Any:
    """An augmentation that draws as many numbers as the sample says."""
    number, value = sample
    return number, value + random.standard_normal(1 + int(number) % 3).sum(dtype="f4")


class Table:
    """A map-style data set; keeps the numbers it was asked for."""

    def __init__(self, by_array: bool) -> None:
        self.by_array = by_array
        self.asked: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: Any) -> Any:
        assert isinstance(number, numpy.ndarray if self.by_array else int)
        self.asked += numpy.atleast_1d(number).tolist()
        values = numpy.asarray(number, "f4")
        return number, numpy.stack([values, -values], axis=-1)


def arrays() -> tuple[numpy.ndarray, numpy.ndarray]:
    numbers = numpy.arange(COUNT)
    return numbers, numpy.stack([numbers, -numbers], axis=-1).astype("f4")


def stream(epoch: int) -> Iterator[Any]:
    """Another order in every epoch."""
    for number in numpy.roll(numpy.arange(COUNT), epoch).tolist():
        yield number, numpy.array([number, -number], "f4")


SOURCES: dict[str, Callable[..., Any]] = {
    "arrays": lambda world, **options: ArrayData(world, arrays(), **options),
    "items": lambda world, **options: MapData(world, Table(False), **options),
    "batches": lambda world, **options: MapData(world, Table(True), by_array=True, **options),
    "stream": lambda world, **options: StreamData(world, stream, **options),
    "counted stream": lambda world, **options: StreamData(world, stream, num_samples=COUNT, **options),
}


def expected_steps(source: str, augment: bool, steps: int = STEPS) -> list[list[tuple[int, list[float]]]]:
    """What one process without any of our classes sees: a list of samples for each step."""
    found: list[list[tuple[int, list[float]]]] = []
    for epoch in range(steps):
        if "stream" in source:
            order = numpy.roll(numpy.arange(COUNT), epoch).tolist()
        else:
            order = permuted(numpy.arange(COUNT), COUNT, (SEED, epoch)).tolist()
        places = order if "stream" not in source else range(COUNT)
        samples = []
        for place, number in zip(places, order, strict=True):
            value = numpy.array([number, -number], "f4")
            if augment:
                value = value + random_of(SEED, epoch, place).standard_normal(1 + number % 3).sum(dtype="f4")
            samples.append((number, value.tolist()))
        found += [samples[begin : begin + GLOBAL_BATCH] for begin in range(0, COUNT, GLOBAL_BATCH)]
    return found[:steps]


def own_steps(data: Any, steps: int) -> list[list[tuple[int, list[float]]]]:
    """This rank's samples of each step; checks what holds them."""
    found = []
    for _ in range(steps):
        (numbers, values), weight = next(data)
        assert type(weight) is int
        assert len(numbers) == len(values) == weight
        assert numbers.dtype.kind == "i"
        assert (values.dtype, values.shape[1:]) == (numpy.float32, (2,))
        found.append(list(zip(numbers.tolist(), values.tolist(), strict=True)))
    return found


def put_together(world: World, mine: list[list[Any]]) -> list[list[Any]]:
    """The ranks' parts of each step in rank order."""
    return [[sample for part in parts for sample in part] for parts in zip(*world.allgather(mine), strict=True)]


def global_steps(world: World, data: Any, steps: int) -> list[list[tuple[int, list[float]]]]:
    """What all ranks together see."""
    return put_together(world, own_steps(data, steps))


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("augment", [False, True], ids=["", "augment"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_steps_are_those_of_one_process(world: World, source: str, augment: bool, prefetch: bool) -> None:
    """Also where the parts become unequal in between."""
    data = SOURCES[source](world, global_batch=GLOBAL_BATCH, seed=SEED, augment=noisy if augment else None)
    if prefetch:
        data = Prefetch(data)
    expected = expected_steps(source, augment)
    assert global_steps(world, data, 4) == expected[:4]
    data.share_out(1.0 + world.rank)
    assert global_steps(world, data, STEPS - 4) == expected[4:]
    assert data.epoch == 2
    if source != "stream":
        assert data.steps_per_epoch == 3


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("source", ["arrays", "items", "stream"])
def test_a_state_is_that_of_the_batch_handed_out(world: World, source: str, prefetch: int) -> None:
    """Whatever was read ahead: a new source that restores it goes on with the next batch."""

    def make() -> Any:
        data = SOURCES[source](world, global_batch=GLOBAL_BATCH, seed=SEED, augment=noisy)
        return Prefetch(data, batches=prefetch) if prefetch else data

    expected = expected_steps(source, True)
    first = make()
    states, went_on, steps = [], [], []
    for number in range(STEPS):
        state = json.loads(json.dumps(first.state()))
        assert (state["epoch"], state["cursor"]) == (
            max(number - 1, 0) // 3,
            min(((number - 1) % 3 + 1) * GLOBAL_BATCH, COUNT) if number else 0,
        )
        second = make()
        second.restore(state)
        assert second.state() == state
        assert second.epoch == state["epoch"]
        went_on += own_steps(second, 1)
        steps += own_steps(first, 1)
        states.append(json.dumps(state))
    first.restore(state)  # backwards, with batches read ahead
    steps += own_steps(first, 1)
    assert len(set(world.allgather(repr(states)))) == 1
    assert put_together(world, went_on) == expected
    assert put_together(world, steps) == expected + expected[-1:]


def test_a_rank_asks_for_its_own_samples_only(world: World) -> None:
    table = Table(False)
    data = MapData(world, table, global_batch=GLOBAL_BATCH)
    mine: list[int] = []
    extra = 0
    for _ in range(STEPS):
        (numbers, _), weight = next(data)
        mine += numbers.tolist()
        extra += not weight  # one for the form
    assert len(table.asked) == len(mine) + extra
    assert [number for number in table.asked if number not in set(mine)][extra:] == []


def test_arrays_in_files_are_those_in_memory(world: World, shared: Path) -> None:
    x, y = samples_of(70)
    if world.is_root:
        numpy.save(shared / "x.npy", x)
        numpy.save(shared / "y.npy", y)
    world.barrier()
    mapped = [numpy.load(shared / f"{name}.npy", mmap_mode="r") for name in "xy"]
    data = ArrayData(world, mapped, global_batch=32)
    other = ArrayData(world, [x, y], global_batch=32)
    for _ in range(5):
        (found, labels), _ = next(data)
        assert type(found) is type(labels) is numpy.ndarray  # no longer the file
        for one, two in zip([found, labels], next(other)[0], strict=True):
            numpy.testing.assert_array_equal(one, two)
    world.barrier()


def test_a_file_that_is_cut_short_is_an_error_on_all_ranks(world: World, shared: Path) -> None:
    if world.is_root:
        numpy.save(shared / "x.npy", numpy.zeros((100, 50)))
        with (shared / "x.npy").open("r+b") as file:
            file.truncate(3000)
    world.barrier()

    def load() -> None:
        with world.together("map the data"):
            numpy.load(shared / "x.npy", mmap_mode="r")

    assert "map the data: ValueError: mmap length is greater than file size" in error_on_all(world, MpitrainError, load)


def test_augmentation_cannot_change_the_data_set(world: World) -> None:
    def spoil(sample: Any, random: numpy.random.Generator) -> Any:
        sample[1][:] = -7
        return sample

    x = arrays()
    data = ArrayData(world, x, global_batch=GLOBAL_BATCH, augment=spoil)
    assert (next(data)[0][1] == -7).all()
    numpy.testing.assert_array_equal(x[1], arrays()[1])


def test_an_error_in_augment_names_the_sample(world: World) -> None:
    def fail(sample: Any, random: numpy.random.Generator) -> Any:
        raise ZeroDivisionError

    data = MapData(world, [(0, 1)] * 10, global_batch=10, shuffle=False, augment=fail)
    before = data.state()
    with pytest.raises(ZeroDivisionError) as caught:
        next(data)
    assert caught.value.__notes__ == [f"in augment, of sample {sum(split(10, [1] * world.size)[: world.rank])}"]
    assert data.state() == before


# -- what cannot be used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 1.0, None])
@pytest.mark.parametrize("source", SOURCES)
def test_a_seed_that_is_none(world: World, source: str, seed: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"seed={seed!r}; it must be an int of at least 0")) as caught:
        SOURCES[source](world, global_batch=GLOBAL_BATCH, seed=seed)
    assert caught.value.known_everywhere


@pytest.mark.parametrize("source", SOURCES)
def test_options_of_numpy(world: World, source: str) -> None:
    """A state has to go into a file."""
    data = SOURCES[source](world, global_batch=numpy.int32(GLOBAL_BATCH), seed=numpy.int64(SEED))
    assert json.loads(json.dumps(data.state()))["seed"] == SEED


def test_data_sets_of_different_lengths(world: World) -> None:
    skip_alone(world)
    samples = list(range(20 + (world.rank == world.size - 1)))
    text = error_on_all(world, MismatchError, lambda: MapData(world, samples, global_batch=10))
    assert "21 samples" in text
    assert "20 samples" in text


def test_a_data_set_without_a_length(world: World) -> None:
    text = error_on_all(world, MpitrainError, lambda: MapData(world, iter([1]), global_batch=10))  # type: ignore[arg-type]
    assert text.startswith(f"{world.name(0)}, look at the data set: TypeError: ")


def test_too_few(world: World) -> None:
    skip_alone(world)
    few = world.size - 1
    with pytest.raises(DataError, match=f"has {few} samples for {world.size} ranks"):
        MapData(world, list(range(few)), global_batch=10)
    with pytest.raises(DataError, match=f"has {few} samples for {world.size} ranks"):
        StreamData(world, stream, global_batch=10, num_samples=few)
    with pytest.raises(ConfigError, match=f"global_batch={few} for {world.size} ranks"):
        StreamData(world, stream, global_batch=few)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none(world: World, speed: float) -> None:
    data = ArrayData(world, arrays(), global_batch=GLOBAL_BATCH)
    odd = world.size - 1
    text = error_on_all(world, ConfigError, lambda: data.share_out(speed if world.rank == odd else 5.0))
    assert text == f"{world.name(odd)} does {speed} samples/s; it must be finite and above 0"
    assert sum(world.allgather(next(data)[1])) == GLOBAL_BATCH


# -- streams ------------------------------------------------------------------------------------------------------


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


# -- prefetch -----------------------------------------------------------------------------------------------------


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
        time.sleep(0.02)  # in which it could go on
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
    """Not earlier; and the batch can be tried again."""
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


def test_training_with_prefetch_has_the_same_bits(world: World) -> None:
    plain = Trainer(builder(71, 23), [StopAtStep(10)])
    plain.run()

    def build(world: World) -> Parts:
        parts = builder(71, 23)(world)
        return replace(parts, data=Prefetch(parts.data))

    trainer = Trainer(build, [StopAtStep(10)])
    trainer.run()
    assert bits(trainer) == bits(plain)


# -- gradients in pieces ------------------------------------------------------------------------------------------


def in_pieces(per_rank_batch: int, function: Any = mlp.loss_and_gradients) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        parts = builder(71, 23, function=function)(world)
        return replace(parts, adapter=Accumulate(parts.adapter, per_rank_batch=per_rank_batch))

    return build


@pytest.mark.parametrize("per_rank_batch", [1, 2, 5, "by rank", 1000])
def test_gradients_in_pieces_are_those_of_the_batch(world: World, per_rank_batch: Any) -> None:
    largest = []

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        largest.append(len(batch[0]))
        return mlp.loss_and_gradients(parameters, batch, on_gradient)

    most = 1 + world.rank if per_rank_batch == "by rank" else per_rank_batch
    record = Record()
    trainer = Trainer(in_pieces(most, function), [StopAtStep(10), record])
    trainer.run()
    parameters, losses, sizes = bare_numpy(71, 23, 10)
    assert max(largest) <= most
    assert [step.samples for step in record.steps] == sizes
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-12)
    for name, value in trainer.adapter.parameters().items():
        numpy.testing.assert_allclose(value, parameters[name], rtol=1e-12, atol=1e-14)
    assert_same_bits(world, *trainer.adapter.parameters().values())


def test_one_piece_has_the_same_bits(world: World) -> None:
    plain = Trainer(builder(71, 23), [StopAtStep(5)])
    plain.run()
    trainer = Trainer(in_pieces(23), [StopAtStep(5)])
    trainer.run()
    assert bits(trainer) == bits(plain)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("missing", MissingGradientError, "dense1.bias"),
        ("twice", GradientError, "the gradient of dense1.bias was handed in twice for the same samples"),
        ("missing, then twice", GradientError, "the gradient of dense1.bias was handed in twice for the same samples"),
        ("shape", GradientError, r"the gradient of dense1.bias is float64 \(1, 5\); the parameter is float64 \(5,\)"),
    ],
)
def test_a_gradient_that_is_wrong_in_one_piece(world: World, what: str, kind: type[MpitrainError], text: str) -> None:
    pieces = 0

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        nonlocal pieces
        pieces += 1

        def pass_on(name: str, gradient: Any) -> None:
            if name != "dense1.bias" or pieces > 2 or (what == "twice" and pieces == 1):
                on_gradient(name, gradient)
            elif what.startswith("missing") and pieces == 1:
                return
            elif what == "missing":
                on_gradient(name, gradient)
            elif what == "shape":
                on_gradient(name, gradient[None])
            else:
                on_gradient(name, gradient)
                on_gradient(name, gradient)

        return mlp.loss_and_gradients(parameters, batch, pass_on)

    trainer = Trainer(in_pieces(2, function))
    before = {name: value.tobytes() for name, value in trainer.adapter.parameters().items()}
    with pytest.raises(kind, match=text):
        trainer.step()
    assert {name: value.tobytes() for name, value in trainer.adapter.parameters().items()} == before


@pytest.mark.parametrize("per_rank_batch", [0, -1, 2.0, True], ids=repr)
def test_pieces_start_at_1(world: World, per_rank_batch: Any) -> None:
    adapter = ArrayFunction(mlp.loss_and_gradients, initial_parameters(), Sgd(RATE))
    with pytest.raises(ConfigError, match=re.escape(f"Accumulate: per_rank_batch={per_rank_batch!r}; it must be a")):
        Accumulate(adapter, per_rank_batch=per_rank_batch)


# -- unequal machines ---------------------------------------------------------------------------------------------


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
            mlp.loss_and_gradients, initial_parameters(), Sgd(RATE, momentum=MOMENTUM, weight_decay=DECAY)
        )
        return Parts(adapter, Sync(), Prefetch(data) if prefetch else data)

    record = Record()
    hook = Pretend(Balance(3), 0.01 * 2**world.rank)
    trainer = Trainer(build, [StopAtStep(8), record, hook])
    trainer.run()
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
