"""Started calls run in order, whichever call advances them. Other algorithms and calls do not come in between."""

from __future__ import annotations

import gc
import weakref

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import ALGORITHMS, make_algorithm, node_memory
from mpitrain.allreduce.algorithm import Algorithm
from mpitrain.errors import DataError, MismatchError, MpitrainError
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.reducer import GradientReducer
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


@pytest.mark.parametrize("threaded", [False, True])
def test_weights_that_add_up_to_nothing_are_an_error_of_finish(world: World, threaded: bool) -> None:
    """Wherever each rank hears of it: a call in between is made by all, and the next step is right."""
    reducer = GradientReducer(world, [Parameter("a", (500,), FLOAT32)], threaded=threaded)
    for weight in (0.0, 1.0, 0.0, 1.0):
        reducer.begin(weight)
        reducer.ready(0, numpy.full(500, world.rank, FLOAT32))
        world.barrier()
        if weight:
            assert reducer.finish(loss=2.0).loss == 2.0
            assert reducer.gradients[0][0] == pytest.approx((world.size - 1) / 2, rel=1e-6)
        else:
            error_on_all(world, DataError, reducer.finish)
