"""Data on any number of ranks is data on one: the same samples in the same steps, changed in the same way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain import World
from mpitrain.data import ArrayData, MapData, Prefetch, StreamData
from mpitrain.data.shares import split
from mpitrain.errors import ConfigError, DataError, MismatchError, MpitrainError

from .common import error_on_all, named_ranks, skip_alone
from .data_sources import (
    COUNT,
    GLOBAL_BATCH,
    SEED,
    SOURCES,
    STEPS,
    Table,
    arrays,
    expected_steps,
    global_steps,
    own_steps,
    put_together,
    stream,
)
from .trainings import samples_of


def noisy(sample: Any, random: numpy.random.Generator) -> Any:
    """An augmentation that draws as many numbers as the sample says."""
    number, value = sample
    return number, value + random.standard_normal(1 + int(number) % 3).sum(dtype="f4")


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize("augment", [False, True], ids=["", "augment"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_steps_are_those_of_one_process(world: World, source: str, augment: bool, prefetch: bool) -> None:
    """The steps are the same even if the parts become unequal in between."""
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
    """Whatever was read ahead: a new source that restores it continues with the next batch."""

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


def test_what_servers_have_left_over_comes_first_in_batches_of_its_own(world: World) -> None:
    """A place of more samples than a batch is read to its end, and the next place begins a batch."""
    batch = world.size + 1
    data = ArrayData(world, (numpy.arange(10 * batch),), global_batch=batch, shuffle=False)
    cursor = 6 * batch
    left = [[0, 1, 2 * batch], [0, 3 * batch, 3 * batch + 1]]
    data.restore({**data.state(), "cursor": cursor, "left": left})
    found = []
    for _ in range(4):
        (own,), _ = next(data)
        found.append([int(number) for of_rank in world.allgather(own.tolist()) for number in of_rank])
    expected = [(1, batch + 1), (batch + 1, 2 * batch), (3 * batch, 3 * batch + 1), (cursor, cursor + batch)]
    assert found == [list(range(begin, end)) for begin, end in expected]
    assert data.state()["cursor"] == cursor + batch
    assert "left" not in data.state()


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


@pytest.mark.parametrize("source", SOURCES)
def test_options_of_numpy(world: World, source: str) -> None:
    """A state has to go into a file."""
    data = SOURCES[source](world, global_batch=numpy.int32(GLOBAL_BATCH), seed=numpy.int64(SEED))
    assert json.loads(json.dumps(data.state()))["seed"] == SEED


def test_a_data_set_without_a_length(world: World) -> None:
    text = error_on_all(world, MpitrainError, lambda: MapData(world, iter([1]), global_batch=10))  # type: ignore[arg-type]
    assert text.startswith(f"{world.name(0)}, look at the data set: TypeError: ")


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none(world: World, speed: float) -> None:
    data = ArrayData(world, arrays(), global_batch=GLOBAL_BATCH)
    odd = world.size - 1
    text = error_on_all(world, ConfigError, lambda: data.share_out(speed if world.rank == odd else 5.0))
    assert text == f"{world.name(odd)} does {speed} samples/s; it must be finite and above 0"
    assert sum(world.allgather(next(data)[1])) == GLOBAL_BATCH


OPTIONS = [{"seed": value} for value in (-1, 1.0, None)] + [{"global_batch": value} for value in (10.0, "10", True)]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_options_that_are_no_numbers(world: World, source: str, option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}; it must be an int")) as caught:
        SOURCES[source](world, **({"global_batch": GLOBAL_BATCH, "seed": SEED} | option))
    assert caught.value.known_everywhere


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (numpy.empty((0, 3)), "the data set has no samples"),
        ((numpy.zeros(20), numpy.zeros(21)), r"found \[0\] 20, \[1\] 21"),
        ((numpy.zeros(20), 1.0), r"found \[0\] 20, \[1\] a number"),
        ({}, "found no arrays"),
    ],
    ids=["empty", "unequal", "number", "nothing"],
)
def test_arrays_that_cannot_be_used(world: World, arrays: Any, text: str) -> None:
    with pytest.raises(DataError, match=text) as caught:
        ArrayData(world, arrays, global_batch=10)
    assert caught.value.known_everywhere


def test_too_few_for_the_ranks(world: World) -> None:
    skip_alone(world)
    few = world.size - 1
    ways: list[Any] = [
        lambda count, batch: ArrayData(world, numpy.zeros(count), global_batch=batch),
        lambda count, batch: MapData(world, list(range(count)), global_batch=batch),
        lambda count, batch: StreamData(world, stream, global_batch=batch, num_samples=count),
    ]
    for make in ways:
        with pytest.raises(DataError, match=f"has {few} samples for {world.size} ranks; start at most {few} ranks"):
            make(few, 10)
        with pytest.raises(ConfigError, match=f"global_batch={few} for {world.size} ranks"):
            make(100, few)
        assert make(world.size, world.size).steps_per_epoch == 1


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"arrays": numpy.zeros((31, 2))}, "the tree float64 (31, 2)"),
        ({"arrays": numpy.zeros((30, 2), "f4")}, "the tree float32 (30, 2)"),
        ({"global_batch": 15}, "global_batch=15 seed=0 shuffle=True"),
        ({"seed": 1}, "global_batch=10 seed=1 shuffle=True"),
        ({"shuffle": False}, "global_batch=10 seed=0 shuffle=False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_with_different_data(world: World, other: dict[str, Any], text: str) -> None:
    skip_alone(world)
    for odd in range(world.size):
        options = {"arrays": numpy.zeros((30, 2)), "global_batch": 10} | (other if world.rank == odd else {})
        found = error_on_all(world, MismatchError, lambda options=options: ArrayData(world, **options))
        named, root = named_ranks(world, odd)
        assert f"{named if odd else root}: {text}; " in found
    samples = list(range(20 + (world.rank == world.size - 1)))
    found = error_on_all(world, MismatchError, lambda: MapData(world, samples, global_batch=10))
    assert "21 samples" in found
    assert "20 samples" in found
