"""The order of a ring that a profile asks for reaches the algorithms."""

from __future__ import annotations

import numpy
import pytest

from mpitrain import World
from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.group import everyone, lane
from mpitrain.profile import Profile
from tests.ranks.common import assert_same_bits

OVER_GROUPS = [name for name, entry in ALGORITHMS.items() if entry.over is not None]
# Only the ring a - c - b - d - a is fast.
FAST = {"ac", "cb", "bd", "da"}
LINKS = tuple(tuple(0.0 if a == b else 1e9 if a + b in FAST else 1e8 for b in "abcd") for a in "abcd")
PROFILE = Profile("test", 50e-6, 1e8, LINKS, tuple("abcd"))


@pytest.fixture
def four_nodes(world: World) -> World:
    """The world as it would be with its ranks dealt out over 4 nodes."""
    if world.size < 4:
        pytest.skip("needs four ranks")
    nodes = tuple(rank % 4 for rank in range(world.size))
    return world.replaced(node_ranks=nodes, hosts=tuple("abcd"[node] for node in nodes), profile=PROFILE)


def test_the_ring_goes_over_the_fast_links(four_nodes: World) -> None:
    order = [0, 2, 1, 3]  # nodes
    members = everyone(four_nodes).members
    assert members == tuple(
        rank for node in order for rank in range(four_nodes.size) if four_nodes.node_ranks[rank] == node
    )
    group = everyone(four_nodes)
    assert group.rank(0) == four_nodes.rank
    mine = lane(four_nodes)
    if four_nodes.rank < 4:  # one lane
        assert mine is not None
        assert mine.members == (0, 2, 1, 3)
    if four_nodes.size == 4:
        hosts = "".join(four_nodes.hosts[rank] for rank in members)
        assert {a + b for a, b in zip(hosts, hosts[1:] + hosts[0], strict=True)} == FAST


@pytest.mark.parametrize("name", sorted({"hierarchical", *OVER_GROUPS}))
def test_sums_in_that_order_are_right(four_nodes: World, name: str) -> None:
    algorithm = ALGORITHMS[name].make(four_nodes)
    for length in (1, 7, 300_001):
        flat = algorithm.allocate(length, numpy.dtype(numpy.int64))
        flat[:] = numpy.arange(length) * (four_nodes.rank + 1)
        algorithm.start(flat).wait()
        assert (flat == numpy.arange(length) * sum(range(1, four_nodes.size + 1))).all()
        assert_same_bits(four_nodes, flat)
