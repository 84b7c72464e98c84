"""Calls run in order, whichever advances them; nothing comes in between; data longer than one call may move."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import ALGORITHMS, make_algorithm, node_memory
from mpitrain.allreduce.algorithm import Algorithm
from mpitrain.errors import MismatchError, MpitrainError
from mpitrain.waiting import transfer
from tests.ranks.common import error_on_all, skip_alone

FLOAT32 = numpy.dtype(numpy.float32)
COUNT = 300_000


@pytest.fixture(params=sorted(ALGORITHMS), scope="module")
def algorithm(request: pytest.FixtureRequest, world: World) -> Algorithm:
    return make_algorithm(world, request.param)


@pytest.mark.parametrize("other", ["native", "ring", "direct", "auto"])
def test_another_sum_while_one_is_on_its_way(world: World, algorithm: Algorithm, other: str) -> None:
    """Ranks are in different places of the first when they come to the second."""
    flat = algorithm.allocate(COUNT, FLOAT32)
    flat[:] = world.rank + 1
    handle = algorithm.start(flat)
    for _ in range(world.rank * 20):
        handle.test()
    between = numpy.full(COUNT, 10.0 * (world.rank + 1))
    make_algorithm(world, other).start(between).wait()
    total = world.sum(numpy.array([world.rank]))
    handle.wait()
    ranks = world.size * (world.size + 1) // 2
    assert (flat == ranks).all()
    assert (between == 10 * ranks).all()
    assert total == ranks - world.size


def test_what_nobody_waits_for_ends_too(world: World, algorithm: Algorithm) -> None:
    """Handle, algorithm and array dropped on one rank, in the middle: the others still get their sum."""
    mine = make_algorithm(world, "ring")
    flat = numpy.full(COUNT, world.rank + 1.0)
    handle = mine.start(flat)
    is_done = any(handle.test() for _ in range(5))
    if world.rank == 0:
        kept = weakref.ref(flat)
        del handle, mine, flat
        gc.collect()
        assert is_done or kept() is not None  # MPI may still write into it
    else:
        handle.wait()
        assert (flat == world.size * (world.size + 1) // 2).all()
    after = numpy.ones(7)
    algorithm.start(after).wait()
    assert (after == world.size).all()


@pytest.mark.parametrize("odd", ["length", "dtype", "memory"])
def test_ranks_that_start_different_sums(world: World, algorithm: Algorithm, odd: str) -> None:
    skip_alone(world)
    differs = world.rank == world.size - 1
    shared = algorithm.allocate(1000, FLOAT32)
    if odd == "memory":
        if algorithm.memory is None or not algorithm.memory.holds(shared):  # type: ignore[attr-defined]
            pytest.skip("this algorithm has no memory of its own here")
        flat = numpy.empty(1000, FLOAT32) if differs else shared
    elif odd == "length":
        flat = numpy.empty(1001 if differs else 1000, FLOAT32)
    else:
        flat = numpy.empty(1000, numpy.float64 if differs else FLOAT32)
    handle = algorithm.start(flat)
    text = error_on_all(world, MismatchError, handle.wait)
    assert world.name(world.size - 1) in text
    assert f"{flat.size} {flat.dtype} in memory" in text or not differs
    error_on_all(world, MismatchError, handle.test)  # again, and never "done"
    after = numpy.ones(7)
    algorithm.start(after).wait()
    assert (after == world.size).all()


def test_an_error_stays_with_the_handle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_alone(world)

    def refuse(*_: object) -> None:
        raise ProcessLookupError(3, "no such process")

    algorithm = make_algorithm(world, "shared_memory")
    flat = numpy.full(100_000, world.rank + 1.0)
    handle = algorithm.start(flat)
    with monkeypatch.context() as patch:
        patch.setattr(node_memory, "_map", refuse)
        error_on_all(world, MpitrainError, handle.wait)
    error_on_all(world, MpitrainError, handle.test)
    assert (flat == world.rank + 1).all()
    assert world.sum(1) == world.size


@pytest.fixture(params=[1, 7, 1000])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(transfer, "AT_ONCE", request.param)
    yield request.param


@pytest.mark.usefixtures("at_once")
def test_sync_and_broadcast_in_slices(world: World) -> None:
    root = world.size - 1
    values = numpy.random.default_rng(world.rank).standard_normal(301)
    expected = numpy.random.default_rng(root).standard_normal(301)
    assert world.broadcast([values], root)[0].tobytes() == expected.tobytes()
    assert world.broadcast_object(values, root).tobytes() == expected.tobytes()


def test_a_broadcast_waits_for_one_slice_after_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Each is a wait of its own, so a long broadcast on a slow link is not reported as one in which nothing moves."""
    monkeypatch.setattr(transfer, "WAITED_AT_ONCE", 5)
    waits = []

    def wait(steps: Any, what: str) -> None:
        waits.append(what)
        world.control.wait(steps, what)

    root = world.size - 1
    buffer = bytearray(numpy.random.default_rng(world.rank).bytes(301))
    transfer.broadcast_bytes(world.comm, buffer, root, wait)
    assert bytes(buffer) == numpy.random.default_rng(root).bytes(301)
    assert waits == [f"broadcast from rank {root}"] * -(-301 // min(at_once, 5))


@pytest.mark.usefixtures("at_once")
def test_gather_in_slices(world: World) -> None:
    assert world.allgather("x" * 40 * world.rank) == ["x" * 40 * rank for rank in range(world.size)]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_allreduce_in_slices(world: World, name: str, dtype: str) -> None:
    flat = (numpy.arange(301) % 50 + world.rank).astype(dtype)  # sums are exact in float16
    ALGORITHMS[name].make(world).start(flat).wait()
    expected = numpy.arange(301) % 50 * world.size + world.size * (world.size - 1) // 2
    numpy.testing.assert_array_equal(flat.astype(numpy.int64), expected)
