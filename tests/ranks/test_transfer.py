"""Data that is longer than one call may move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.waiting import transfer


@pytest.fixture(params=[1, 7, 1000], autouse=True)
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(transfer, "AT_ONCE", request.param)
    yield request.param


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


def test_gather_in_slices(world: World) -> None:
    assert world.allgather("x" * 40 * world.rank) == ["x" * 40 * rank for rank in range(world.size)]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_allreduce_in_slices(world: World, name: str, dtype: str) -> None:
    flat = (numpy.arange(301) % 50 + world.rank).astype(dtype)  # sums are exact in float16
    ALGORITHMS[name].make(world).start(flat).wait()
    expected = numpy.arange(301) % 50 * world.size + world.size * (world.size - 1) // 2
    numpy.testing.assert_array_equal(flat.astype(numpy.int64), expected)
