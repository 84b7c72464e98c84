"""mt.workers, mt.run_on and mt.map_on on all ranks: values, places, order, refusals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import mpitrain as mt
from mpitrain import World
from mpitrain.errors import DeviceError, MpitrainError, RemoteError
from mpitrain.remote.leader import RemoteFuture


def led(world: World, body: Callable[[], object]) -> None:
    """Run `body` on the leader of a block."""
    with mt.workers(world) as leads:
        if leads:
            body()


def rank_and(value: Any) -> tuple[int, int, Any]:
    return mt.init().rank, os.getpid(), value


def changed(array: numpy.ndarray) -> numpy.ndarray:
    array += mt.init().rank + 1
    return array


def refuses(number: int) -> None:
    raise ValueError(f"{number} is odd on rank {mt.init().rank}")


def half(number: int) -> int:
    if number % 2:
        refuses(number)
    return number // 2


def generator() -> Any:
    return (number for number in range(3))


def collective() -> None:
    mt.init().barrier()


def nested() -> None:
    mt.run_on(0, rank_and, None)


def leaves() -> None:
    raise SystemExit(3)


def unmade(value: int) -> Any:
    return Unmade(value)


class Unmade:
    """Can be pickled, and not made again."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return refuses, (self.value,)


def test_every_rank_runs_its_function(world: World) -> None:
    pids = world.allgather(os.getpid())

    def body() -> None:
        futures = [mt.run_on(rank, rank_and, 10 * rank) for rank in range(world.size)]
        assert [future.result() for future in reversed(futures)] == [
            (rank, pids[rank], 10 * rank) for rank in reversed(range(world.size))
        ]
        assert all(future.done() and future.rank == rank for rank, future in enumerate(futures))
        assert futures[-1].result()[0] == world.size - 1  # the same answer again

    led(world, body)
    assert world.sum(numpy.array([world.rank + 1])) == world.size * (world.size + 1) // 2


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
}


def test_arrays_there_and_back(world: World) -> None:
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

    led(world, body)


def test_bfloat16_there_and_back(world: World) -> None:
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    array = numpy.arange(5).astype(dtype)

    def body() -> None:
        *_, value = mt.run_on(world.size - 1, rank_and, array).result()
        assert value.dtype == dtype
        assert value.tobytes() == array.tobytes()

    led(world, body)


def test_the_arguments_of_the_program_stay(world: World) -> None:
    """The function may change its copy, also on the leader, and also where the program's array is read-only."""
    arrays = numpy.zeros(5), numpy.zeros(5)
    arrays[1].flags.writeable = False

    def body() -> None:
        for array in arrays:
            for rank in range(world.size):
                assert mt.run_on(rank, changed, array).result().tolist() == [rank + 1] * 5
            assert not array.any()

    led(world, body)


def test_places_of_all_kinds(world: World) -> None:
    def body() -> None:
        for where in (f"rank {world.size - 1}", [world.size - 1]):
            assert mt.run_on(where, rank_and, 0).result()[0] == world.size - 1
        for where in (world.hosts[-1], f"node {world.node_ranks[-1]}"):
            rank, *_ = mt.run_on(where, rank_and, 0).result()
            # The leader comes last.
            assert rank == next((other for other in range(1, world.size)), 0)

    led(world, body)


def test_an_unknown_place(world: World) -> None:
    def body() -> None:
        for where in (-1, 99, "node 9", "elsewhere", "cuda:0", []):
            with pytest.raises(ValueError, match=r"rank 0 on .*there are ranks? 0.*'node 0' \(rank") as raised:
                mt.run_on(where, rank_and, 0)
            assert f"where={where!r}" in str(raised.value)

    led(world, body)


def test_many_functions_for_one_rank_run_in_order(world: World, shared: Path) -> None:
    def body() -> None:
        futures = [mt.run_on(world.size - 1, written, str(shared / "order"), number) for number in range(20)]
        futures[-1].result()
        assert all(future.done() for future in futures)
        assert (shared / "order").read_text() == "".join(f"{number} " for number in range(20))

    led(world, body)


def written(path: str, number: int) -> None:
    with Path(path).open("a") as file:
        file.write(f"{number} ")


def test_map_on_keeps_the_order(world: World) -> None:
    def body() -> None:
        for number in (0, 1, 2, 13):
            cubes = mt.map_on(range(world.size), pow, range(number), [3] * number)
            assert cubes == [value**3 for value in range(number)]
        ranks = {rank for rank, *_ in mt.map_on(range(world.size), rank_and, range(10 * world.size))}
        assert ranks <= set(range(world.size))
        assert len(ranks) >= min(2, world.size)
        with pytest.raises(ValueError, match="zip"):
            mt.map_on(0, pow, [1, 2], [1])

    led(world, body)


def test_an_exception_comes_back_and_the_job_goes_on(world: World) -> None:
    def body() -> None:
        for rank in range(world.size):
            future = mt.run_on(rank, half, 7)
            for _ in range(2):
                with pytest.raises(RemoteError) as raised:
                    future.result()
                assert str(raised.value).startswith(
                    f"{world.name(rank)}: half raised ValueError: 7 is odd on rank {rank}"
                )
                assert "in refuses" in str(raised.value)  # the frame there
                assert "execute.py" not in str(raised.value)
                assert raised.value.kind == "ValueError"
            assert mt.run_on(rank, half, 8).result() == 4

    led(world, body)
    world.barrier()


def test_a_function_that_cannot_be_used(world: World) -> None:
    refused: list[tuple[Callable[[], Any], str]] = [
        (generator, "the result of generator, of type generator, cannot be sent"),
        (collective, r"a collective call inside of mt\.workers"),
        (leaves, "leaves raised SystemExit: 3"),
    ]

    def body() -> None:
        for function, words in refused:
            for rank in range(world.size):
                with pytest.raises(RemoteError, match=rf"rank {rank} on .*{words}"):
                    mt.run_on(rank, function).result()

    led(world, body)
    world.barrier()


def test_arguments_that_cannot_be_made_there(world: World) -> None:
    def body() -> None:
        with pytest.raises(RemoteError, match=r"(?s)cannot be made there: ValueError: 5 is odd on rank"):
            mt.run_on(world.size - 1, rank_and, Unmade(5)).result()

    led(world, body)


def test_workers_do_not_lead(world: World) -> None:
    if world.size == 1:
        pytest.skip("there is no worker")

    def body() -> None:
        with pytest.raises(RemoteError, match=r"mt\.run_on on a worker; only rank 0 on"):
            mt.run_on(1, nested).result()

    led(world, body)
    with mt.workers(world) as leads:
        pass
    assert leads == (world.rank == 0)
    with pytest.raises(MpitrainError, match="outside of a block"):
        mt.run_on(0, rank_and, 0)


def test_what_cannot_be_pickled_is_named_and_nothing_is_sent(world: World) -> None:
    def inside() -> None: ...

    def body() -> None:
        for function, arguments, words in (
            (lambda: 1, (), "the function .*<lambda> cannot be sent"),
            (inside, (), "the function .*inside cannot be sent"),
            (rank_and, (0, generator()), "argument 2 of rank_and, of type generator, cannot be sent"),
        ):
            for rank in range(world.size):
                with pytest.raises(TypeError, match=rf"rank 0 on .*: run_on: {words}"):
                    mt.run_on(rank, function, *arguments)
        assert mt.run_on(world.size - 1, half, 4).result() == 2

    led(world, body)


def test_collective_calls_in_the_body_are_refused(world: World) -> None:
    def body() -> None:
        allreduce = lambda: mt.collectives.allreduce(world, numpy.ones(2))  # noqa: E731
        for call in (world.barrier, lambda: world.mean(1.0), allreduce, world.apart):
            with pytest.raises(MpitrainError, match=r"a collective call inside of mt.workers"):
                call()
        with pytest.raises(MpitrainError, match=r"mt.workers inside of mt.workers"), mt.workers(world):
            pass

    led(world, body)
    assert world.sum(numpy.ones(1)) == world.size


def with_a_note() -> None:
    error = ValueError("the reason")
    error.add_note("a note")
    raise error


class OnlySent:
    """Cannot be made from its pickle."""

    def __reduce__(self) -> Any:
        return half, (3,)


def test_words_of_errors(world: World) -> None:
    """A note is not the error, and a result that the leader cannot make is a RemoteError each time."""

    def body() -> None:
        last = world.size - 1
        with pytest.raises(RemoteError, match="with_a_note raised ValueError: the reason"):
            mt.run_on(last, with_a_note).result()
        future = mt.run_on(last, OnlySent)
        for _ in range(2):
            with pytest.raises(
                RemoteError, match=rf"rank {last} on .*: the result of OnlySent cannot be made"
            ) as caught:
                future.result()
            assert caught.value.kind == "ValueError"

    led(world, body)


def test_a_gpu_that_cannot_be_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function does not run on the host in its place."""

    def refuse(*_: object) -> None:
        raise DeviceError("it is broken")

    monkeypatch.setattr("mpitrain.remote.block.own_device", lambda world: "cuda:0" if world.rank == 0 else "")
    monkeypatch.setattr("mpitrain.remote.execute.bound", lambda: None)
    monkeypatch.setattr("mpitrain.remote.execute.open_gpu", refuse)

    def body() -> None:
        with pytest.raises(RemoteError, match="half has not begun: cuda:0 cannot be used: it is broken"):
            mt.run_on("cuda:0", half, 4).result()

    led(world, body)


def test_an_error_that_nobody_has_asked_for(world: World) -> None:
    if world.is_root:
        with pytest.raises(RemoteError, match="half raised ValueError: 3 is odd"):
            led(world, lambda: mt.run_on(world.size - 1, half, 3))
    else:
        led(world, lambda: None)
    world.barrier()


def test_a_body_that_fails_drops_what_has_not_begun(world: World) -> None:
    futures: list[RemoteFuture] = []

    def body() -> None:
        futures.extend(mt.run_on(world.size - 1, changed, numpy.zeros(200_000)) for _ in range(3))
        raise KeyError("the body")

    if world.is_root:
        with pytest.raises(KeyError, match="the body"):
            led(world, body)
        with pytest.raises(MpitrainError, match=r"changed: the block of mt.workers has ended by an error before it"):
            futures[-1].result()
    else:
        led(world, body)
    assert world.sum(numpy.array([world.rank])) == world.size * (world.size - 1) // 2
    led(world, lambda: None)


def test_map_on_stops_at_the_first_error(world: World, shared: Path) -> None:
    def body() -> None:
        paths = [str(shared / f"{number}") for number in range(40)]
        with pytest.raises(RemoteError, match="2 fails"):
            mt.map_on(range(world.size), marked, paths, [number == 2 for number in range(40)])
        assert 3 <= len(list(shared.iterdir())) < 40

    led(world, body)


def marked(path: str, fails: bool) -> None:
    Path(path).touch()
    if fails:
        raise ValueError(f"{Path(path).name} fails")
    if int(Path(path).name) > 2:
        time.sleep(0.1)  # those that are dropped
