"""Streams of samples that end early or late, and batches that a thread reads ahead."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpitrain import World
from mpitrain.data import MapData, Prefetch, StreamData
from mpitrain.errors import CheckpointError, ConfigError, DataError

from .data_sources import COUNT, GLOBAL_BATCH, SEED, SOURCES, STEPS, Table, expected_steps, global_steps, stream

# -- streams ----------------------------------------------------------------------------------------------------


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


# -- prefetch ---------------------------------------------------------------------------------------------------


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
