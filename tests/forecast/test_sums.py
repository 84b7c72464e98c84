"""The time of an allreduce on equal machines, against the algorithm's own arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from mpitrain.allreduce import ALGORITHMS
from mpitrain.compression import make_codec
from mpitrain.errors import ConfigError
from mpitrain.forecast.events import Events, Network
from mpitrain.forecast.machines import Machines, equal_machines
from mpitrain.forecast.sums import check_sum, flat_buffer, make_sums

B, L = 1e8, 1e-3
MACHINES = equal_machines(8, bytes_per_second=B, latency_seconds=L)
ADD, COPY = MACHINES.costs.add_bytes_per_second, MACHINES.costs.copy_bytes_per_second


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7])
def test_ring_of_one_piece_a_segment(p: int) -> None:
    """2 (p - 1) times a segment over a link, one after the other, and p - 1 additions."""
    segment = 1000 * 4
    expected = 2 * (p - 1) * (L + segment / B) + (p - 1) * segment / ADD
    assert seconds("ring", p, 1000 * p) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_doubling_of_one_piece(p: int) -> None:
    """log2 p times the whole buffer, or halves of it down and up again."""
    phases, whole = p.bit_length() - 1, 8000 * 4
    assert seconds("recursive_doubling", p, 8000) == pytest.approx(phases * (L + whole / B + whole / ADD), rel=1e-12)
    part = whole * (p - 1) / p
    expected = 2 * (phases * L + part / B) + part / ADD
    assert seconds("halving_doubling", p, 8000) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [2, 3, 5])
def test_direct_of_one_piece(p: int) -> None:
    """p - 1 segments over each link in each phase; the last one that comes is added alone."""
    segment = 1000 * 4
    expected = 2 * (L + (p - 1) * segment / B) + segment / ADD
    assert seconds("direct", p, 1000 * p) == pytest.approx(expected, rel=1e-9)


def test_a_long_ring_is_bound_by_the_link() -> None:
    """With many pieces, latencies and additions hide behind the link: 2 (p - 1) / p N / B, and 1 % more at most."""
    count = 20_000_000
    bound = 2 * 3 / 4 * count * 4 / B
    assert bound < seconds("ring", 4, count) < bound * 1.01


def test_one_node() -> None:
    """shared_memory: k - 1 additions and k - 1 copies of a kth of the buffer, and two meetings of log2 k messages."""
    node = replace(equal_machines(1, ranks_per_node=4), inside_latency_seconds=1e-5)
    count = 400_000
    part = count
    expected = 3 * part / ADD + 3 * part / COPY + 4 * 1e-5
    assert seconds("shared_memory", 4, count, node) == pytest.approx(expected, rel=1e-12)


def test_several_ranks_on_a_node() -> None:
    """hierarchical: each byte crosses a link once a node, so no longer with k ranks, but for the memory's time."""
    wide = replace(MACHINES, ranks_per_node=2, inside_latency_seconds=0.0)
    count = 20_000_000
    inside = count * 4 / 2 / ADD + count * 4 / 2 / COPY
    bound = 2 * 3 / 4 * count * 4 / B + inside
    assert bound * 0.999 < seconds("hierarchical", 8, count, wide) < bound * 1.02


@pytest.mark.parametrize("codec", ["int8", "bf16", "top_k:0.05"])
def test_a_codec_takes_its_bytes_and_its_time(codec: str) -> None:
    """On two nodes: both halves or the whole of the buffer, as the real codec packs it; and the time at its rate."""
    count, near = 2_000_000, replace(MACHINES, latency_seconds=0.0)
    real = make_codec(codec)
    way = real.wire_bytes(count) if real.gathered else 2 * real.wire_bytes(count // 2)
    assert seconds("auto", 2, count, near, codec=codec) == pytest.approx(way / B, rel=0.01)
    # A profile has codecs by their names without a setting.
    slow = replace(MACHINES, costs=replace(MACHINES.costs, codecs=((codec.partition(":")[0], 1e6),)))
    # direct: halves are encoded and added, the sum is encoded, and both halves are decoded; gathered: the whole is
    # encoded, decoded and added.
    passes = 3 * 1.0 if real.gathered else 5 * 0.5
    assert seconds("auto", 2, count, slow, codec=codec) == pytest.approx(count * 4 * passes / 3e6, rel=0.02)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("name", sorted(name for name, entry in ALGORITHMS.items() if entry.over and name != "native"))
def test_algorithms_in_which_all_ranks_are_alike(name: str, p: int) -> None:
    """With Entry.is_alike, a rank sends what rank 0 sends, as far on. No other algorithm does so on 3 ranks."""
    node_of = tuple(range(p))
    events = Events(Network(MACHINES, node_of), p, records=True)
    flat = flat_buffer(events, MACHINES, 420 * 1000)
    events.run([steps(flat) for steps in make_sums(events, MACHINES, node_of, name, "none")])
    assert events.sent is not None
    ways: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]
    for source, target, tag, num_bytes in events.sent:
        ways[source].append(((target - source) % p, tag, num_bytes))
    are_alike = all(sorted(way) == sorted(ways[0]) for way in ways)
    if ALGORITHMS[name].is_alike or p == 3:
        assert are_alike == ALGORITHMS[name].is_alike


def test_sums_that_cannot_be_simulated() -> None:
    for name in ALGORITHMS:
        if name == "native":
            with pytest.raises(ConfigError, match="native is MPI's own allreduce"):
                check_sum(name, "none", 2)
        elif name == "shared_memory":
            with pytest.raises(ConfigError, match="for ranks on one node; these are on 2 nodes"):
                check_sum(name, "none", 2)
        else:
            check_sum(name, "none", 2)
    with pytest.raises(ConfigError, match="there is no allreduce algorithm 'rign'; known: auto, direct"):
        check_sum("rign", "none", 2)
    with pytest.raises(ConfigError, match="the codec 'power_sgd' cannot be simulated; known: none, bf16"):
        check_sum("auto", "power_sgd", 2)
    with pytest.raises(ConfigError, match="leave out --algorithms ring"):
        check_sum("ring", "int8", 2)
    measured = replace(MACHINES.costs, origin="lab.json", nodes=("a", "b"), codecs=(("bf16", 1e9), ("int8", 1e9)))
    with pytest.raises(ConfigError, match=r"lab\.json has no time of the codec top_k, only of: bf16, int8\. Measure"):
        check_sum("auto", "top_k:0.1", 2, measured)
    check_sum("auto", "top_k:0.1", 1, measured)  # nothing is coded on one node
    check_sum("auto", "int8", 2, measured)


def test_a_buffer_longer_than_the_memory() -> None:
    """700 GB: slices and views of it have their lengths, and adding and copying take their time."""
    events = Events(Network(MACHINES, (0,)), 1)
    flat = flat_buffer(events, MACHINES, 175_000_000_000)
    part = flat[1_000_000_000:3_000_000_000]
    octets = part.view(numpy.uint8)
    assert (flat.nbytes, part.size, octets.size) == (700_000_000_000, 2_000_000_000, 8_000_000_000)
    assert octets[4:].view(numpy.float32).size == 1_999_999_999
    part += part
    assert events.running.clock == pytest.approx(8e9 / ADD)
    octets[:1000] = octets[1000:2000]
    assert events.running.clock == pytest.approx(8e9 / ADD + 1000 / COPY)


def seconds(name: str, num_ranks: int, count: int, machines: Machines = MACHINES, codec: str = "none") -> float:
    """The time until the last rank has the sum."""
    node_of = machines.nodes_of(num_ranks)
    events = Events(Network(machines, node_of), num_ranks)
    flat = flat_buffer(events, machines, count)
    events.run([steps(flat) for steps in make_sums(events, machines, node_of, name, codec)])
    return max(rank.clock for rank in events.ranks)
