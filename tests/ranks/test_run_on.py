"""mt.workers, mt.run_on and mt.map_on on all ranks: values, places, order, refusals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest

import mpitrain as mt
from mpitrain import World
from mpitrain.collectives import allreduce
from mpitrain.errors import DeviceError, MpitrainError, RemoteError
from mpitrain.remote.leader import RemoteFuture

Body = Callable[[], object]


@pytest.fixture
def led(world: World) -> Callable[[Body], None]:
    """Run a function on the leader of a block; after it the ranks are in step."""

    def run(body: Body) -> None:
        with mt.workers(world) as leads:
            assert leads == world.is_root
            if leads:
                body()
        assert world.sum(world.rank + 1) == world.size * (world.size + 1) // 2

    return run


def changed(array: numpy.ndarray) -> numpy.ndarray:
    array += mt.init().rank + 1
    return array


def refuses(number: int) -> None:
    raise ValueError(f"{number} is odd on rank {mt.init().rank}")


def half(number: int) -> int:
    if number % 2:
        refuses(number)
    return number // 2


def with_a_note() -> None:
    error = ValueError("the reason")
    error.add_note("a note")
    raise error


class OnlySent:
    """Cannot be made from its pickle."""

    def __reduce__(self) -> Any:
        return half, (3,)


def written(path: str, number: int) -> None:
    with Path(path).open("a") as file:
        file.write(f"{number} ")


def marked(path: str, fails: bool) -> None:
    Path(path).touch()
    if fails:
        raise ValueError(f"{Path(path).name} fails")
    if int(Path(path).name) > 2:
        time.sleep(0.1)  # those that are dropped


def rank_and(value: Any) -> tuple[int, int, Any]:
    return mt.init().rank, os.getpid(), value


def generator() -> Any:
    return (number for number in range(3))


def collective() -> None:
    mt.init().barrier()


def nested() -> None:
    mt.run_on(0, rank_and, None)


def leaves() -> None:
    raise SystemExit(3)


class Unmade:
    """Can be pickled, and not made again."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return refuses, (self.value,)


def test_every_rank_runs_its_function(world: World, led: Any) -> None:
    pids = world.allgather(os.getpid())

    def body() -> None:
        futures = [mt.run_on(rank, rank_and, 10 * rank) for rank in range(world.size)]
        assert [future.result() for future in reversed(futures)] == [
            (rank, pids[rank], 10 * rank) for rank in reversed(range(world.size))
        ]
        assert all(future.done() and future.rank == rank for rank, future in enumerate(futures))
        assert futures[-1].result()[0] == world.size - 1  # the same answer again

    led(body)


ARRAYS = {
    "0-d": numpy.array(2.5),
    "no element": numpy.zeros((0, 3), numpy.float32),
    "one element": numpy.array([7], numpy.int8),
    "rows": numpy.arange(12.0).reshape(3, 4),
    "columns": numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4)),
    "not contiguous": numpy.arange(40).reshape(5, 8)[::2, ::-3],
    "larger than pieces": numpy.arange(2**18 + 1, dtype=numpy.uint16),
    "booleans": numpy.array([True, False]),
    "complex": numpy.array([1 + 2j]),
    "records": numpy.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "times": numpy.array(["2020-01-02"], "M8[D]"),
    "text": numpy.array(["ab", "c"]),
    "objects": numpy.array([None, "x"], object),
    "bfloat16": numpy.arange(5).astype(ml_dtypes.bfloat16),
}


def test_arrays_there_and_back(world: World, led: Any) -> None:
    def body() -> None:
        for kind, array in ARRAYS.items():
            for rank in range(world.size):
                *_, value = mt.run_on(rank, rank_and, {"one": array, "again": array}).result()
                one = value["one"]
                assert one.dtype == array.dtype, kind
                assert one.shape == array.shape, kind
                assert numpy.array_equal(one, array), kind
                assert one.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc, kind
                assert one is value["again"], kind  # sent once

    led(body)


def test_places(world: World, led: Any) -> None:
    def body() -> None:
        for where in (f"rank {world.size - 1}", [world.size - 1]):
            assert mt.run_on(where, rank_and, 0).result()[0] == world.size - 1
        for where in (world.hosts[-1], f"node {world.node_ranks[-1]}"):
            rank, *_ = mt.run_on(where, rank_and, 0).result()
            assert rank == min(1, world.size - 1)  # the leader comes last
        for where in (-1, 99, "node 9", "elsewhere", "cuda:0", []):
            with pytest.raises(ValueError, match=r"rank 0 on .*there are ranks? 0.*'node 0' \(rank") as raised:
                mt.run_on(where, rank_and, 0)
            assert f"where={where!r}" in str(raised.value)

    led(body)


def test_arguments_stay_and_functions_run_in_order(world: World, led: Any, shared: Path) -> None:
    """A function may change its copy, also on the leader, and also where the program's array is read-only."""
    arrays = numpy.zeros(5), numpy.zeros(5)
    arrays[1].flags.writeable = False

    def body() -> None:
        for array in arrays:
            for rank in range(world.size):
                assert mt.run_on(rank, changed, array).result().tolist() == [rank + 1] * 5
            assert not array.any()
        futures = [mt.run_on(world.size - 1, written, str(shared / "order"), number) for number in range(20)]
        futures[-1].result()
        assert all(future.done() for future in futures)
        assert (shared / "order").read_text() == "".join(f"{number} " for number in range(20))

    led(body)


def test_map_on(world: World, led: Any, shared: Path) -> None:
    """It keeps the order, and stops at the first error."""

    def body() -> None:
        everyone = range(world.size)
        for number in (0, 1, 2, 13):
            assert mt.map_on(everyone, pow, range(number), [3] * number) == [value**3 for value in range(number)]
        ranks = {rank for rank, *_ in mt.map_on(everyone, rank_and, range(10 * world.size))}
        assert ranks <= set(everyone)
        assert len(ranks) >= min(2, world.size)
        with pytest.raises(ValueError, match="zip"):
            mt.map_on(0, pow, [1, 2], [1])
        paths = [str(shared / f"{number}") for number in range(40)]
        with pytest.raises(RemoteError, match="2 fails"):
            mt.map_on(everyone, marked, paths, [number == 2 for number in range(40)])
        assert 3 <= len(list(shared.iterdir())) < 40

    led(body)


def test_an_exception_comes_back_and_the_job_goes_on(world: World, led: Any) -> None:
    """Each time that it is asked for; a note is not the error."""

    def body() -> None:
        for rank in range(world.size):
            future = mt.run_on(rank, half, 7)
            for _ in range(2):
                with pytest.raises(RemoteError) as raised:
                    future.result()
                text = str(raised.value)
                assert text.startswith(f"{world.name(rank)}: half raised ValueError: 7 is odd on rank {rank}")
                assert "in refuses" in text  # the frame there
                assert "execute.py" not in text
                assert raised.value.kind == "ValueError"
            assert mt.run_on(rank, half, 8).result() == 4

    led(body)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (generator, (), "the result of generator, of type generator, cannot be sent"),
        (OnlySent, (), "the result of OnlySent cannot be made"),
        (rank_and, (Unmade(5),), r"(?s)cannot be made there: ValueError: 5 is odd on rank"),
        (collective, (), r"a collective call inside mt\.workers"),
        (leaves, (), "leaves raised SystemExit: 3"),
        (with_a_note, (), "with_a_note raised ValueError: the reason"),
    ],
)
def test_a_function_that_cannot_be_used(world: World, led: Any, function: Any, arguments: Any, words: str) -> None:
    def body() -> None:
        future = mt.run_on(world.size - 1, function, *arguments)
        for _ in range(2):
            with pytest.raises(RemoteError, match=words) as raised:
                future.result()
            assert world.name(world.size - 1) in str(raised.value)

    led(body)


def test_what_only_the_leader_may_do(world: World, led: Any) -> None:
    """And what it may not: collective calls, a block in a block, and functions that cannot be sent."""

    def inside() -> None: ...

    def body() -> None:
        if world.size > 1:
            with pytest.raises(RemoteError, match=r"mt\.run_on on a worker; only rank 0 on"):
                mt.run_on(1, nested).result()
        for call in (world.barrier, lambda: world.mean(1.0), lambda: allreduce(world, numpy.ones(2)), world.apart):
            with pytest.raises(MpitrainError, match=r"a collective call inside mt.workers"):
                call()
        with pytest.raises(MpitrainError, match=r"mt.workers inside mt.workers"), mt.workers(world):
            pass
        for function, arguments, words in (
            (lambda: 1, (), "the function .*<lambda> cannot be sent"),
            (inside, (), "the function .*inside cannot be sent"),
            (rank_and, (0, generator()), "argument 2 of rank_and, of type generator, cannot be sent"),
        ):
            for rank in range(world.size):
                with pytest.raises(TypeError, match=rf"rank 0 on .*: run_on: {words}"):
                    mt.run_on(rank, function, *arguments)
        assert mt.run_on(world.size - 1, half, 4).result() == 2

    led(body)
    with pytest.raises(MpitrainError, match="outside of a block"):
        mt.run_on(0, rank_and, 0)


def test_a_gpu_that_cannot_be_used(world: World, led: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function does not run on the host in its place."""

    def refuse(*_: object) -> None:
        raise DeviceError("it is broken")

    monkeypatch.setattr("mpitrain.remote.block.own_device", lambda world: "cuda:0" if world.rank == 0 else "")
    monkeypatch.setattr("mpitrain.remote.execute.bound", lambda: None)
    monkeypatch.setattr("mpitrain.remote.execute.open_gpu", refuse)

    def body() -> None:
        with pytest.raises(RemoteError, match="half has not begun: cuda:0 cannot be used: it is broken"):
            mt.run_on("cuda:0", half, 4).result()

    led(body)


def test_blocks_that_end_by_an_error(world: World, led: Any) -> None:
    """One that nobody has asked for; and one of the body, which drops what has not begun."""
    futures: list[RemoteFuture] = []

    def fails() -> None:
        futures.append(mt.run_on(world.size - 1, time.sleep, 0.5))
        futures.append(mt.run_on(world.size - 1, half, 4))  # has not begun when the body ends
        raise KeyError("the body")

    bodies: list[tuple[Body, Any]] = [
        (lambda: mt.run_on(world.size - 1, half, 3), pytest.raises(RemoteError, match="half raised ValueError: 3 is")),
        (fails, pytest.raises(KeyError, match="the body")),
    ]
    for body, raises in bodies:
        with raises if world.is_root else nullcontext(), mt.workers(world) as leads:
            if leads:
                body()
        assert world.sum(1) == world.size
    if world.is_root:
        with pytest.raises(MpitrainError, match=r"half: the block of mt.workers has ended by an error before it"):
            futures[-1].result()
    led(lambda: None)
