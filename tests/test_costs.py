"""What follows from the profile of a cluster: the order of a ring, algorithms, buckets, whether a codec pays; and what
counts as faster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy
import pytest

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import Steps
from mpitrain.allreduce.costs import (
    Topology,
    best_codec,
    bucket_bytes,
    codec_seconds,
    codecs_of_auto,
    compression,
    native_below_bytes,
)
from mpitrain.allreduce.direct import direct_seconds
from mpitrain.allreduce.hierarchical import hierarchical_seconds
from mpitrain.allreduce.native import native_seconds
from mpitrain.allreduce.registry import by_cost, candidates, changes, cheapest, priced
from mpitrain.allreduce.ring import ring_seconds
from mpitrain.allreduce.shared_memory import shared_memory_seconds
from mpitrain.noise import error_of_mean, median_and_error, noise
from mpitrain.profile import DEFAULT, Profile, ring_order


def linked(slow: set[tuple[str, str]], names: str = "abcde", rate: float = 10e6) -> Profile:
    """All links at 100 MB/s, with up to 4 % of noise, but for the slow ones."""
    links = tuple(
        tuple(
            0.0 if a == b else rate if (a, b) in slow else 100e6 + (7 * i + 3 * j) % 5 * 1e6
            for j, b in enumerate(names)
        )
        for i, a in enumerate(names)
    )
    return Profile("test", 50e-6, 100e6, links, tuple(names))


def ring_of(nodes: str, profile: Profile) -> str:
    return "".join(nodes[place] for place in ring_order(nodes, profile))


def test_noise_keeps_the_order() -> None:
    assert ring_of("abcde", linked(set())) == "abcde"
    assert ring_of("ebdac", linked(set())) == "ebdac"


@pytest.mark.parametrize("nodes", ["abcde", "edcba", "badce", "abcd"])
@pytest.mark.parametrize("slow", ["ab", "bc", "ea", "da"])
def test_the_ring_goes_round_a_slow_link(nodes: str, slow: str) -> None:
    """In the direction that is slow; the other one may be taken."""
    profile = linked({(slow[0], slow[1])})
    ring = ring_of(nodes, profile)
    assert sorted(ring) == sorted(nodes)
    assert slow not in ring + ring[0]


def test_two_pairs_with_slow_links_between_them() -> None:
    """Two switches, a and c, b and d: as few links between them as can be, which is two."""
    between = {(x, y) for x in "ac" for y in "bd"} | {(y, x) for x in "ac" for y in "bd"}
    assert ring_of("abcd", linked(between)) == "abcd"  # any ring has a slow link, so nothing is gained


def test_where_nothing_was_measured_or_there_is_no_choice() -> None:
    assert ring_order(["x", "y", "z", "w"], DEFAULT) == [0, 1, 2, 3]
    assert ring_of("cab", linked({("c", "a")})) == "cab"
    assert ring_order(["a"], linked(set())) == [0]


GIGABIT = Profile("test", 50e-6, 100e6)


def between(profile: Profile, nodes: int, lanes: int = 1) -> Topology:
    return Topology(profile, (1,) * nodes, lanes)


def test_costs_by_hand() -> None:
    # 4 nodes, 8 MB: 6 latencies and 12 MB of wire; or 2 latencies and 4 % more of it.
    assert ring_seconds(8_000_000, between(GIGABIT, 4)) == pytest.approx(300e-6 + 0.12)
    assert direct_seconds(8_000_000, between(GIGABIT, 4)) == pytest.approx(100e-6 + 0.1248)
    # 2 lanes share the link.
    assert ring_seconds(8_000_000, between(GIGABIT, 4, lanes=2)) == pytest.approx(300e-6 + 0.24)
    # On 2 nodes there is one sender for each receiver.
    pair = between(GIGABIT, 2)
    assert direct_seconds(8_000_000, pair) == ring_seconds(8_000_000, pair) == 100e-6 + 0.08


def test_between_nodes_by_hand() -> None:
    # 4 latencies saved, 200 us; 0.04 x 1.5 / 100e6 lost for each byte: 0.6 ns. 333 333.3 bytes.
    for lanes, limit in ((1, 333_333), (2, 166_666)):
        place = between(GIGABIT, 4, lanes)
        assert cheapest(limit, place, priced(place))[1] == "direct"
        assert cheapest(limit + 1, place, priced(place))[1] == "ring"
        assert sorted(candidates(place)) == ["direct", "ring"]
    # Both take two latencies on two nodes. The ring comes first in the registry.
    assert candidates(between(GIGABIT, 2)) == ["ring"]


def test_native_below_bytes_by_hand() -> None:
    assert native_below_bytes(GIGABIT, 1) == 16 * 1024
    # Beyond the two latencies of direct: none on 2 nodes, 2 on 4, 4 on 5 to 8; 50 us each, against 200 us.
    assert [native_below_bytes(GIGABIT, nodes) for nodes in (2, 3, 4)] == [256 * 1024] * 3
    assert [native_below_bytes(GIGABIT, nodes) for nodes in (5, 8, 9)] == [0] * 3
    assert native_below_bytes(dataclasses.replace(GIGABIT, latency_seconds=1.0), 2) == 256 * 1024


def test_native_below_bytes_as_measured() -> None:
    measured = dataclasses.replace(GIGABIT, native_below_bytes=8192)
    assert [native_below_bytes(measured, nodes) for nodes in (1, 2, 9)] == [8192] * 3
    assert native_below_bytes(dataclasses.replace(GIGABIT, native_below_bytes=0), 2) == 0


def test_predicted_by_hand() -> None:
    memory = dataclasses.replace(GIGABIT, add_bytes_per_second=4e9, copy_bytes_per_second=2e9)
    # 3 ranks add a third each of 8 MB to it twice, and copy it twice: 16/3 MB at 0.25 ns a byte and at 0.5 ns.
    assert shared_memory_seconds(8_000_000, Topology(memory, (3,))) == pytest.approx(16e6 / 3 * 0.75e-9)
    # A rank alone on each of 4 nodes: nothing inside.
    alone, lane = Topology(memory, (1,) * 4), between(memory, 4)
    assert hierarchical_seconds(8_000_000, alone) == ring_seconds(8_000_000, lane)
    assert hierarchical_seconds(80_000, alone) == direct_seconds(80_000, lane)
    # 2 lanes: each adds half of 8 MB once, on the node of 3 ranks twice.
    inside, wire = 8e6 * 0.75e-9, ring_seconds(4_000_000, between(memory, 4, lanes=2))
    assert hierarchical_seconds(8_000_000, Topology(memory, (2, 3, 2, 2))) == pytest.approx(inside + wire)
    # Where they cannot run.
    assert shared_memory_seconds(1, alone) == hierarchical_seconds(1, Topology(memory, (3,))) == math.inf
    assert ring_seconds(1, Topology(memory, (2, 2))) == direct_seconds(1, Topology(memory, (2, 2))) == math.inf


def test_native_in_proportion() -> None:
    """To what sums large buffers: the two are equally fast at the limit, which is measured or a rule of thumb."""
    for topology, limit, large in (
        (Topology(GIGABIT, (4,)), 16 * 1024, shared_memory_seconds),
        (Topology(GIGABIT, (2, 2)), 256 * 1024, hierarchical_seconds),
    ):
        assert native_seconds(limit // 2, topology) == pytest.approx(large(limit // 2, topology) / 2)
        assert native_seconds(limit - 1, topology) < large(limit - 1, topology)
        assert native_seconds(limit, topology) == math.inf
    assert native_seconds(1, between(GIGABIT, 2)) == math.inf  # a lane is no whole communicator


def test_bucket_bytes_by_hand() -> None:
    assert bucket_bytes(DEFAULT, 4) == bucket_bytes(linked(set()), 1) == 4 * 2**20
    measured = linked(set())  # the fastest link has 104 MB/s
    slow = dataclasses.replace(measured, latency_seconds=1e-3)
    assert bucket_bytes(slow, 4) == 20 * 4 * 104_000  # 1 ms at 104 MB/s are 104 000 bytes
    # 6 ms of latency are a twentieth of 120 ms, in which 2 x 3/4 of the bucket go over the wire (at 104 MB/s).
    assert 6e-3 / (1.5 * bucket_bytes(slow, 4) / 104e6) == pytest.approx(1 / 20)
    assert bucket_bytes(measured, 4) == 2**20  # 416 000, were it not for the lower limit
    assert bucket_bytes(dataclasses.replace(measured, latency_seconds=1.0), 4) == 64 * 2**20


def coded(nodes: int, lanes: int = 1, **rates: float) -> Topology:
    """Nodes on links of 100 MB/s, and codecs of these rates."""
    return between(dataclasses.replace(linked(set()), codecs=tuple(rates.items())), nodes, lanes)


def test_the_time_of_a_codec_by_hand() -> None:
    # 2 x 3/4 of 4 MB at 100 MB/s are 60 ms, of bf16 half of it; a core of 1 GB/s takes 4 ms for 4 MB.
    place = coded(4, bf16=1e9)
    assert codec_seconds("none", 1_000_000, place) == (pytest.approx(0.06), 0.0)
    assert codec_seconds("bf16", 1_000_000, place) == (pytest.approx(0.03), pytest.approx(0.004))
    assert codec_seconds("int8", 1_000_000, place)[1] == math.inf  # its rate is not known
    # The lanes of a node share its link, and each has a core of its own.
    assert codec_seconds("bf16", 1_000_000, coded(4, 2, bf16=1e9)) == (pytest.approx(0.03), pytest.approx(0.002))


def test_a_codec_must_save_twice_its_time() -> None:
    # On 2 nodes a byte takes 10 ns on the wire; half of it saves 5 ns; half of that may go to the codec: 400 MB/s.
    for rate, lanes, expected in ((399e6, 1, "none"), (401e6, 1, "bf16"), (101e6, 4, "bf16"), (99e6, 4, "none")):
        assert best_codec(["bf16"], 2**20, coded(2, lanes, bf16=rate)) == expected
    # On 4 nodes half as much again travels: 267 MB/s.
    for rate, expected in ((266e6, "none"), (268e6, "bf16")):
        assert best_codec(["bf16"], 2**20, coded(4, bf16=rate)) == expected
    both = ["bf16", "int8"]
    assert best_codec(both, 2**20, coded(2, bf16=9e9, int8=9e9)) == "int8"
    assert best_codec(both, 2**20, coded(2, bf16=9e9, int8=35e7)) == "bf16"  # 2.5 ns saved, 2.9 for the codec
    assert best_codec([], 2**20, coded(2, bf16=9e9)) == best_codec(both, 2**20, coded(2)) == "none"


def test_compression_auto_takes_what_has_never_cost_loss() -> None:
    assert codecs_of_auto() == ["bf16"]
    fast = coded(2, bf16=1e12, int8=1e12, int4=1e12).profile
    assert (compression(fast, 2, 1), compression(fast, 1, 1)) == ("bf16", "none")
    assert compression(dataclasses.replace(fast, nodes=()), 2, 1) == "none"  # not measured


# -- auto and hierarchical take the cheapest for each size -----------------------------------------------------------


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


def test_noise() -> None:
    assert noise(1.0) == 0.02
    assert noise(1.0, 0.03, 0.04) == pytest.approx(0.1)
    assert median_and_error([3.0]) == (3.0, 0.0)
    assert error_of_mean([3.0]) == 0.0
    random = numpy.random.default_rng(0)
    many = random.normal(10, 2, (2000, 101))
    assert numpy.median([median_and_error(row.tolist())[1] for row in many]) == pytest.approx(
        numpy.median(many, axis=1).std(), rel=0.1
    )
    assert numpy.mean([error_of_mean(row.tolist()) for row in many]) == pytest.approx(many.mean(axis=1).std(), rel=0.1)
