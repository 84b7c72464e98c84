"""ArrayData and evaluate: every sample counts once, on any number of ranks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy
import pytest

from mpitrain import Evaluation, StopAtStep, Trainer, World, evaluate
from mpitrain.data import ArrayData
from mpitrain.errors import ConfigError, DataError, MismatchError, MpitrainError
from mpitrain.job.worlds import make_world

from .common import error_on_all, named_ranks, skip_alone
from .trainings import builder

# -- evaluate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 7, 64, 101])
@pytest.mark.parametrize("samples_at_once", [1, 4, 1000])
def test_evaluate_counts_every_sample_once(world: World, count: int, samples_at_once: int) -> None:
    values = numpy.random.default_rng(count).standard_normal(count)
    seen: list[int] = []

    def metrics(part: Mapping[str, numpy.ndarray]) -> dict[str, float]:
        assert 0 < len(part["x"]) <= samples_at_once
        seen.extend(part["number"].tolist())
        return {"mean": float(part["x"].mean()), "ones": 1.0}

    arrays = {"x": values, "number": numpy.arange(count)}
    result = evaluate(world, metrics, arrays, samples_at_once=samples_at_once)
    assert math.isclose(result["mean"], math.fsum(values) / count, rel_tol=1e-12, abs_tol=1e-15)
    assert result["ones"] == 1.0
    assert [number for its in world.allgather(seen) for number in its] == list(range(count))
    assert len(set(world.allgather(result["mean"]))) == 1


@pytest.mark.parametrize("count", [1, 6, 40, 61])
def test_evaluate_by_virtual_ranks_has_the_same_bits_on_any_ranks(world: World, count: int) -> None:
    """The calls are the same on one rank: samples, their place in memory, and the rounded sum of all."""
    x = numpy.random.default_rng(4).standard_normal((count + 1, 3))[1:]  # begins in the middle of a cache line
    calls: list[tuple[float, int, int]] = []

    def metrics(batch: Any) -> dict[str, float]:
        calls.append((float(batch[0, 0]), len(batch), batch.ctypes.data % 64))
        return {"mean": float(batch.mean()) / 3 * 10.0 ** (len(batch) * 3)}

    with_all = evaluate(world, metrics, x, samples_at_once=4, virtual_ranks=7)
    of_all = [call for of_rank in world.allgather(calls) for call in of_rank]
    calls.clear()
    own = make_world(world.comm.Split(world.rank, 0))
    assert evaluate(own, metrics, x, samples_at_once=4, virtual_ranks=7) == with_all
    assert of_all == calls
    assert sum(size for _, size, _ in calls) == count
    assert {place for *_, place in calls} == {0}


def test_evaluate_refuses_what_it_cannot_count(world: World) -> None:
    def never(_: Any) -> dict[str, float]:
        raise AssertionError

    with pytest.raises(DataError, match="no samples to evaluate"):
        evaluate(world, never, numpy.empty((0, 3)))
    with pytest.raises(DataError, match=r"found \[0\] 5, \[1\] 4"):
        evaluate(world, never, (numpy.zeros(5), numpy.zeros(4)))
    with pytest.raises(ConfigError, match="samples_at_once=0; it must be at least 1"):
        evaluate(world, never, numpy.zeros(5), samples_at_once=0)
    with pytest.raises(ConfigError, match="virtual_ranks=0; it must be at least 1"):
        evaluate(world, never, numpy.zeros(5), virtual_ranks=0)


def test_evaluate_of_different_data(world: World) -> None:
    skip_alone(world)
    count = 6 if world.rank == world.size - 1 else 5
    text = error_on_all(world, MismatchError, lambda: evaluate(world, lambda _: {}, numpy.zeros(count)))
    assert "the tree float64 (6,)" in text
    assert "the tree float64 (5,)" in text


def test_evaluate_hook(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    hook = Evaluation(2, lambda trainer: {"step": trainer.step_number, "half": 0.5})
    Trainer(builder(20, 10), [StopAtStep(5), hook]).run()
    assert hook.results == {number: {"step": number, "half": 0.5} for number in (2, 4, 5)}
    lines = [f"step {number}: step {number}.0000, half 0.5000\n" for number in (2, 4, 5)]
    assert capsys.readouterr().out == ("".join(lines) if world.rank == 0 else "")


# -- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("count", "global_batch"), [(50, 16), (23, 7), (9, 9)])
def test_an_epoch_has_every_sample_once(world: World, count: int, global_batch: int, shuffle: bool) -> None:
    data = ArrayData(
        world, {"x": numpy.arange(count), "y": [-numpy.arange(count)]}, global_batch=global_batch, shuffle=shuffle
    )
    assert data.steps_per_epoch == -(-count // global_batch)
    epochs = []
    for epoch in range(3):
        order = []
        for _ in range(data.steps_per_epoch):
            batch, weight = next(data)
            assert len(batch["x"]) == weight
            assert (batch["y"][0] == -batch["x"]).all()
            order.append(batch["x"].tolist())
            assert data.epoch == epoch
        every = world.allgather(order)
        epochs.append([x for step in zip(*every, strict=True) for part in step for x in part])
        assert sorted(epochs[-1]) == list(range(count))
    if shuffle:
        assert epochs[0] != epochs[1] != epochs[2]
    else:
        assert epochs == [list(range(count))] * 3


def test_data_goes_on_where_it_stood(world: World) -> None:
    def some(data: ArrayData, steps: int) -> list[list[int]]:
        return [next(data)[0].tolist() for _ in range(steps)]

    whole = ArrayData(world, numpy.arange(20), global_batch=8, seed=5)
    expected = some(whole, 8)
    for steps in range(8):
        first = ArrayData(world, numpy.arange(20), global_batch=8, seed=5)
        assert some(first, steps) == expected[:steps]
        second = ArrayData(world, numpy.arange(20), global_batch=8, seed=5)
        second.restore(json.loads(json.dumps(first.state())))
        assert some(second, 8 - steps) == expected[steps:]


@pytest.mark.parametrize(
    ("arrays", "kind", "text"),
    [
        (numpy.empty((0, 3)), DataError, "the data set has no samples"),
        ((numpy.zeros(20), numpy.zeros(21)), DataError, r"found \[0\] 20, \[1\] 21"),
        ((numpy.zeros(20), 1.0), DataError, r"found \[0\] 20, \[1\] a number"),
        ({}, DataError, "found no arrays"),
    ],
    ids=["empty", "unequal", "number", "nothing"],
)
def test_data_that_cannot_be_used(world: World, arrays: Any, kind: type[MpitrainError], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        ArrayData(world, arrays, global_batch=10)
    assert caught.value.known_everywhere


def test_too_few_samples_for_the_ranks(world: World) -> None:
    skip_alone(world)
    few = world.size - 1
    with pytest.raises(DataError, match=f"has {few} samples for {world.size} ranks; start at most {few} ranks"):
        ArrayData(world, numpy.zeros(few), global_batch=100)
    with pytest.raises(ConfigError, match=f"global_batch={few} for {world.size} ranks"):
        ArrayData(world, numpy.zeros(100), global_batch=few)
    assert ArrayData(world, numpy.zeros(world.size), global_batch=world.size).steps_per_epoch == 1


@pytest.mark.parametrize("global_batch", [10.0, "10", True, None], ids=repr)
def test_a_global_batch_that_is_no_int(world: World, global_batch: Any) -> None:
    text = re.escape(f"global_batch={global_batch!r}; it must be an int")
    with pytest.raises(ConfigError, match=text) as caught:
        ArrayData(world, numpy.zeros(20), global_batch=global_batch)
    assert caught.value.known_everywhere


def test_a_global_batch_of_numpy(world: World) -> None:
    data = ArrayData(world, numpy.zeros(20), global_batch=numpy.int32(10))  # type: ignore[arg-type]
    assert type(data.global_batch) is int


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
