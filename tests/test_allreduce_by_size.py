"""auto and hierarchical: for each size the algorithm with the lowest predicted time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Steps
from mpitrain.allreduce.costs import Topology
from mpitrain.allreduce.registry import by_cost, candidates, changes
from mpitrain.profile import Profile

GIGABIT = Profile("test", 50e-6, 100e6)


def taken(topology: Topology, *sizes: int) -> list[str]:
    """The names of the algorithms that run for buffers of so many bytes."""
    started: list[str] = []

    def make(name: str) -> Steps:
        def steps(flat: numpy.ndarray, residual: numpy.ndarray | None = None) -> Iterator[None]:
            started.append(name)
            return iter(())

        return steps

    steps = by_cost(topology, {name: make(name) for name in candidates(topology)})
    for size in sizes:
        steps(numpy.empty(size, numpy.int8))
    return started


@pytest.mark.parametrize(("lanes", "limit"), [(1, 333_334), (2, 166_667)])
def test_between_four_nodes(lanes: int, limit: int) -> None:
    topology = Topology(GIGABIT, (1,) * 4, lanes)
    assert taken(topology, 0, limit - 1, limit, 10 * limit) == ["direct", "direct", "ring", "ring"]


def test_between_two_nodes_always_the_ring() -> None:
    assert taken(Topology(GIGABIT, (1, 1), 2), 1, 2**20) == ["ring", "ring"]


def test_all_ranks() -> None:
    limit = 256 * 1024
    assert taken(Topology(GIGABIT, (2, 2)), 1, limit - 1, limit) == ["native", "native", "hierarchical"]
    assert taken(Topology(GIGABIT, (4,)), 16 * 1024 - 1, 16 * 1024) == ["native", "shared_memory"]


def test_where_the_choice_changes() -> None:
    limits = [(0, "a"), (77, "b"), (1000, "c"), (1003, "d"), (2**30, "e")]
    assert changes(lambda num_bytes: [text for begin, text in limits if begin <= num_bytes][-1]) == limits
    assert changes(lambda num_bytes: "a") == [(0, "a")]


def test_a_cheaper_entry_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every level: of all ranks, and over the lanes between nodes."""
    entry = ALGORITHMS["recursive_doubling"]._replace(seconds=lambda num_bytes, topology: 0.0)
    monkeypatch.setitem(ALGORITHMS, "recursive_doubling", entry)
    assert taken(Topology(GIGABIT, (2, 2)), 1, 2**24) == ["recursive_doubling"] * 2
