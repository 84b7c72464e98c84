"""hierarchical: direct below the size from which the ring is faster, ring from there on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest

from mpitrain.allreduce.costs import ring_from_bytes
from mpitrain.allreduce.hierarchical import by_size
from mpitrain.profile import Profile
from mpitrain.world import World

# The package has a function of the same name.
MODULE = sys.modules[by_size.__module__]
GIGABIT = Profile("test", 50e-6, 100e6)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the algorithms that were started."""
    started: list[str] = []

    def make(name: str) -> Any:
        def steps(flat: numpy.ndarray, residual: object = None) -> Iterator[None]:
            started.append(name)
            return iter(())

        return lambda group: steps

    for name in ("direct", "ring"):
        monkeypatch.setattr(MODULE, f"{name}_steps", make(name))
    return started


@pytest.mark.parametrize(("node_ranks", "lanes"), [((0, 1, 2, 3), 1), ((0, 0, 1, 1, 2, 2, 3, 3), 2)])
def test_the_faster_one(node_ranks: tuple[int, ...], lanes: int, taken: list[str]) -> None:
    limit = ring_from_bytes(GIGABIT, 4, lanes)
    assert limit > 100_000
    world = cast(World, SimpleNamespace(profile=GIGABIT, node_ranks=node_ranks))
    steps = by_size(world)(cast(Any, None))
    for size in (0, limit - 1, limit, 10 * limit):
        steps(numpy.empty(size, numpy.int8))
    assert taken == ["direct", "direct", "ring", "ring"]


def test_on_two_nodes_always_the_ring(taken: list[str]) -> None:
    steps = by_size(cast(World, SimpleNamespace(profile=GIGABIT, node_ranks=(0, 1))))(cast(Any, None))
    steps(numpy.empty(1, numpy.int8))
    assert taken == ["ring"]
