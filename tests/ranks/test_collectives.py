"""The library calls: every one at every number of ranks, overlapping, dropped, and called wrongly."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import pytest

from mpitrain import GradientReducer, Parameter, World, collectives
from mpitrain.allreduce.algorithm import DTYPES
from mpitrain.collectives import moves
from mpitrain.errors import MismatchError, TreeError
from mpitrain.waiting import pieces
from mpitrain.world.shard import part_of
from tests.ranks.common import assert_same_bits, error_on_all, named_ranks, skip_alone

LENGTHS = (0, 1, 2, 7, 1000, 5003)
MOVED = [*DTYPES, *(numpy.dtype(name) for name in ("?", "c8", "c16", "M8[s]", "S5", ">i4", "i4,f8"))]


@pytest.fixture(params=[pieces.PIECE_BYTES, 1000, 16], ids=lambda nbytes: f"{nbytes} bytes a piece")
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Short pieces: many of them, also where arrays are small."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", request.param)
    for name in ("direct", "window"):  # from sys.modules: the package has a function direct as well
        monkeypatch.setattr(sys.modules[f"mpitrain.allreduce.{name}"], "piece_bytes", lambda group: request.param)
    monkeypatch.setattr(collectives, "_made", WeakKeyDictionary())  # those that were made have their pieces
    return int(request.param)


@pytest.fixture(params=[moves.SHORT_BYTES, 0], ids=["", "none short"])
def short_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Below which some calls go another way."""
    monkeypatch.setattr(moves, "SHORT_BYTES", request.param)
    return int(request.param)


def pattern(length: int, rank: int, *, seed: int = 0) -> numpy.ndarray:
    """Small integers that differ from rank to rank and place to place; sums of 7 ranks are exact in every dtype."""
    return ((numpy.arange(length) * 7 + rank * 5 + seed * 3) % 17).astype(numpy.int8)


def filled(dtype: numpy.dtype, shape: tuple[int, ...], rank: int) -> numpy.ndarray:
    """Every byte of it its own, whatever the dtype."""
    nbytes = int(numpy.prod(shape)) * dtype.itemsize
    content = (numpy.arange(nbytes) * 3 + rank * 41) % (2 if dtype.kind == "b" else 251)
    return content.astype(numpy.uint8).view(dtype).reshape(shape)


def rows(rank: int) -> int:
    """The number of rows of a rank; some ranks have none."""
    return (0, 3, 1, 0, 250, 2, 7)[rank]


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3), (7,), (1003, 2), (5, 0, 2)], ids=str)
def test_reduce_scatter(world: World, shape: tuple[int, ...]) -> None:
    length = int(numpy.prod(shape))
    result = collectives.reduce_scatter(world, pattern(length, world.rank).astype(numpy.float32).reshape(shape)).wait()
    total = sum((pattern(length, rank).astype(numpy.int64) for rank in range(world.size)), numpy.zeros(length, int))
    numpy.testing.assert_array_equal(result, total.reshape(shape)[part_of(shape[0], world.rank, world.size)])
    assert result.dtype == numpy.float32


@pytest.mark.usefixtures("short_bytes", "piece_bytes")
@pytest.mark.parametrize("length", LENGTHS)
def test_allreduce(world: World, length: int) -> None:
    mine = pattern(length, world.rank).astype(numpy.float64)
    result = collectives.allreduce(world, mine).wait()
    numpy.testing.assert_array_equal(result, sum(pattern(length, rank).astype(int) for rank in range(world.size)))
    numpy.testing.assert_array_equal(mine, pattern(length, world.rank))  # not changed


@pytest.mark.usefixtures("short_bytes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", [collectives.allreduce, collectives.reduce_scatter])
def test_sums_in_every_dtype(world: World, call: Callable[..., Any], dtype: numpy.dtype) -> None:
    length = 41 * world.size
    result = call(world, pattern(length, world.rank).astype(dtype)).wait()
    total = sum(pattern(length, rank).astype(int) for rank in range(world.size))
    mine = part_of(length, world.rank, world.size) if call is collectives.reduce_scatter else slice(None)
    assert result.dtype == dtype
    numpy.testing.assert_array_equal(result.astype(int), total[mine])


@pytest.mark.usefixtures("short_bytes")
@pytest.mark.parametrize("length", [3, 1001, 70_001])
def test_an_inexact_allreduce_has_the_same_bits_everywhere(world: World, length: int) -> None:
    values = numpy.random.default_rng(world.rank).standard_normal(length)
    first = collectives.allreduce(world, values).wait()
    assert_same_bits(world, first)
    assert collectives.allreduce(world, values).wait().tobytes() == first.tobytes()
    everybodys = world.allgather(values)
    bound = world.size * numpy.finfo(float).eps * sum(abs(one) for one in everybodys)
    assert (abs(first - sum(everybodys)) <= bound).all()


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("rest", [(), (3,), (2, 0), (5, 7)], ids=str)
def test_allgather_of_unequal_lengths(world: World, rest: tuple[int, ...]) -> None:
    shapes = [(rows(rank), *rest) for rank in range(world.size)]
    parts = [filled(numpy.dtype("i4"), shape, rank) for rank, shape in enumerate(shapes)]
    result = collectives.allgather(world, parts[world.rank]).wait()
    numpy.testing.assert_array_equal(result, numpy.concatenate(parts))


@pytest.mark.usefixtures("piece_bytes")
def test_alltoall_of_unequal_lengths(world: World) -> None:
    def part(source: int, target: int) -> numpy.ndarray:
        return filled(numpy.dtype("f8"), (rows((source * 2 + target) % 7), 2), source * 7 + target)

    results = collectives.alltoall(world, [part(world.rank, rank) for rank in range(world.size)]).wait()
    assert len(results) == world.size
    for rank, result in enumerate(results):
        assert result.tobytes() == part(rank, world.rank).tobytes()
        assert result.shape == part(rank, world.rank).shape


@pytest.mark.usefixtures("short_bytes", "piece_bytes")
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (1003, 2), (9000,)], ids=str)
def test_broadcast_from_every_root(world: World, shape: tuple[int, ...]) -> None:
    for root in range(world.size):
        mine = filled(numpy.dtype("f4"), shape, world.rank)
        result = collectives.broadcast(world, mine, root).wait()
        assert result.tobytes() == filled(numpy.dtype("f4"), shape, root).tobytes()
        assert result.shape == shape
        assert mine.tobytes() == filled(numpy.dtype("f4"), shape, world.rank).tobytes()


@pytest.mark.usefixtures("short_bytes")
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_any_dtype_is_moved(world: World, dtype: numpy.dtype) -> None:
    everybodys = [filled(dtype, (3, 5), rank) for rank in range(world.size)]
    mine = everybodys[world.rank]
    gathered = collectives.allgather(world, mine).wait()
    assert gathered.dtype == dtype
    assert gathered.tobytes() == b"".join(one.tobytes() for one in everybodys)
    root = world.size - 1
    assert collectives.broadcast(world, mine, root).wait().tobytes() == everybodys[root].tobytes()
    swapped = collectives.alltoall(world, [mine[:rank] for rank in range(world.size)]).wait()
    assert [one.tobytes() for one in swapped] == [one[: world.rank].tobytes() for one in everybodys]


def test_input_of_any_layout_and_results_that_are_ones_own(world: World) -> None:
    whole = numpy.arange(60.0).reshape(6, 10) + world.rank
    for mine in (whole[::2], whole.T, numpy.asfortranarray(whole), numpy.broadcast_to(whole[0], (4, 10))):
        before = mine.copy()
        mine.flags.writeable = False
        result = collectives.allreduce(world, mine).wait()
        gathered = collectives.allgather(world, mine).wait()
        swapped = collectives.alltoall(world, [mine] * world.size).wait()
        sent = collectives.broadcast(world, mine).wait()
        scattered = collectives.reduce_scatter(world, mine).wait()
        numpy.testing.assert_array_equal(result, before * world.size + sum(range(world.size)) - world.rank * world.size)
        numpy.testing.assert_array_equal(gathered[: len(mine)], before - world.rank)
        for one in (result, gathered, sent, scattered, *swapped):
            one[...] = -1  # new arrays, that may be written to
        numpy.testing.assert_array_equal(mine, before)


def test_overlapping_and_waited_for_in_any_order(world: World) -> None:
    flats = [pattern(length, world.rank, seed=length).astype(float) for length in (90_000, 3, 0, 40_001)]
    handles = [collectives.allreduce(world, flat) for flat in flats]
    mean = world.mean({"x": numpy.full(5, world.rank + 1.0)})
    gathered = collectives.allgather(world, numpy.full((2, 2), world.rank))
    text = world.broadcast_object("a" if world.is_root else None)
    for number in (3, 0, 2, 1):
        length = flats[number].size
        expected = sum(pattern(length, rank, seed=length).astype(int) for rank in range(world.size))
        numpy.testing.assert_array_equal(handles[number].wait(), expected)
        assert handles[number].test()
    while not gathered.test():
        pass
    assert (gathered.wait()[:, 0] == numpy.repeat(numpy.arange(world.size), 2)).all()
    assert (mean["x"] == (world.size + 1) / 2).all()
    assert text == "a"


def test_ranks_may_wait_in_different_places(world: World) -> None:
    """A rank that waits in another call of the world advances these calls too."""
    handle = collectives.allgather(world, numpy.full(300_000, world.rank))
    with world.same_call("both have a barrier"):
        if world.rank % 2:
            world.barrier()
            result = handle.wait()
        else:
            result = handle.wait()
            world.barrier()
    assert result[::300_000].tolist() == list(range(world.size))


@pytest.mark.parametrize("threaded", [False, True])
def test_beside_a_step_of_a_reducer(world: World, threaded: bool) -> None:
    reducer = GradientReducer(
        world, [Parameter(f"w{i}", (1000,), numpy.dtype("f4")) for i in range(4)], bucket_bytes=2000, threaded=threaded
    )
    for _ in range(3):
        reducer.begin(1.0)
        first = collectives.allreduce(world, numpy.full(20_000, 1.0 + world.rank))
        for index in (3, 0, 1, 2):
            reducer.ready(index, numpy.full(1000, world.rank + index, numpy.float32))
            last = collectives.broadcast(world, numpy.full(9, index + world.rank), root=world.size - 1)
        assert (last.wait() == 2 + world.size - 1).all()
        reducer.finish(0.0)
        assert (first.wait() == world.size * (world.size + 1) / 2).all()
        for index, gradient in enumerate(reducer.gradients):
            numpy.testing.assert_allclose(gradient, (world.size - 1) / 2 + index, rtol=1e-6)


def test_a_dropped_handle_still_takes_part(world: World) -> None:
    for _ in range(3):
        collectives.allreduce(world, numpy.ones(30_000))
    gc.collect()
    kept = collectives.allgather(world, numpy.full(30_000, world.rank))
    if world.rank == 0:
        del kept
    else:
        assert kept.wait()[::30_000].tolist() == list(range(world.size))
    world.barrier()


C = collectives
# A call of which an odd rank gives something else, and what is then said of it.
WRONG: dict[str, tuple[Callable[[World, bool], Any], str]] = {
    "another dtype": (lambda w, odd: C.allgather(w, numpy.ones(3, "f4" if odd else "f8")), "float32"),
    "another shape": (lambda w, odd: C.allreduce(w, numpy.ones((2, 5) if odd else (5, 2))), "(2, 5)"),
    "another rest": (lambda w, odd: C.allgather(w, numpy.ones((2, 5 if odd else 4))), "(any length, 5)"),
    "another length": (lambda w, odd: C.reduce_scatter(w, numpy.ones(6 if odd else 5)), "(6,)"),
    "another root": (lambda w, odd: C.broadcast(w, numpy.ones(3), int(odd)), "from rank 1"),
    "another call": (lambda w, odd: (C.allreduce if odd else C.reduce_scatter)(w, numpy.ones(3)), "s.allreduce"),
    "another rest of one": (lambda w, odd: C.alltoall(w, [numpy.ones((1, 3 - odd))] * w.size), "(any length, 2)"),
    "no call of its own": (
        lambda w, odd: w.begin_agreement("barrier") if odd else C.allgather(w, numpy.ones(3)),
        "barrier",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_ranks_that_disagree_all_hear_of_it(world: World, wrong: str) -> None:
    skip_alone(world)
    call, text = WRONG[wrong]
    for odd in {0, world.size - 1}:
        before = collectives.allreduce(world, numpy.ones(1000))
        handle = call(world, world.rank == odd)
        after = collectives.allgather(world, numpy.array([world.rank]))
        message = error_on_all(world, MismatchError, handle.wait)
        assert text in message
        assert all(name in message for name in named_ranks(world, odd))
        # The others are not touched by it.
        assert after.wait().tolist() == list(range(world.size))
        assert (before.wait() == world.size).all()
        if isinstance(handle, collectives.Handle):
            with pytest.raises(MismatchError):
                handle.test()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda w: collectives.allreduce(w, numpy.ones(3, bool)), "allreduce of bool: it cannot be summed; allowed"),
        (lambda w: collectives.reduce_scatter(w, numpy.ones(3, ">f4")), "reduce_scatter of >f4: it cannot be summed"),
        (lambda w: collectives.reduce_scatter(w, numpy.ones(())), "along the first dimension"),
        (lambda w: collectives.allgather(w, numpy.ones(())), "along the first dimension"),
        (lambda w: collectives.allgather(w, [1.0, 2.0]), "takes a NumPy or CuPy array, not list"),
        (lambda w: collectives.broadcast(w, numpy.array([None])), "broadcast of dtype object"),
        (lambda w: collectives.broadcast(w, numpy.empty(3, numpy.dtype([]))), "its items have no bytes"),
    ],
)
def test_what_cannot_be_sent_is_refused(world: World, call: Callable[[World], Any], text: str) -> None:
    with pytest.raises(TreeError, match=text):
        call(world)


def test_wrong_arguments(world: World) -> None:
    with pytest.raises(ValueError, match=rf"alltoall of {world.size + 1} arrays"):
        collectives.alltoall(world, [numpy.ones(1)] * (world.size + 1))
    with pytest.raises(ValueError, match=r"root=-1"):
        collectives.broadcast(world, numpy.ones(1), -1)
    if world.size > 1:
        with pytest.raises(TreeError, match=r"rank 1 is float32 \(any length\), that for rank 0 float64"):
            collectives.alltoall(world, [numpy.ones(1), *[numpy.ones(1, "f4")] * (world.size - 1)])
