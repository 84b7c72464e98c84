"""What follows from the profile of a cluster: the order of a ring, algorithms, buckets, whether a codec pays."""

from __future__ import annotations

import dataclasses

import pytest

from mpitrain.allreduce.costs import bucket_bytes, native_below_bytes, pays, predicted, ring_from_bytes, seconds
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


def test_costs_by_hand() -> None:
    # 4 nodes, 8 MB: 6 latencies and 12 MB of wire; or 2 latencies and 4 % more of it.
    assert seconds("ring", 8_000_000, GIGABIT, 4) == pytest.approx(300e-6 + 0.12)
    assert seconds("direct", 8_000_000, GIGABIT, 4) == pytest.approx(100e-6 + 0.1248)
    # 2 lanes share the link.
    assert seconds("ring", 8_000_000, GIGABIT, 4, lanes=2) == pytest.approx(300e-6 + 0.24)
    # On 2 nodes there is one sender for each receiver.
    assert seconds("direct", 8_000_000, GIGABIT, 2) == seconds("ring", 8_000_000, GIGABIT, 2) == 100e-6 + 0.08


def test_ring_from_bytes_by_hand() -> None:
    assert ring_from_bytes(GIGABIT, 2) == 0
    # 4 latencies saved, 200 us; 0.04 x 1.5 / 100e6 lost for each byte: 0.6 ns.
    assert ring_from_bytes(GIGABIT, 4) == round(200e-6 / 0.6e-9) == 333_333
    assert ring_from_bytes(GIGABIT, 4, lanes=2) == 166_667
    for lanes in (1, 2):
        limit = ring_from_bytes(GIGABIT, 4, lanes)
        assert seconds("ring", limit - 1000, GIGABIT, 4, lanes) > seconds("direct", limit - 1000, GIGABIT, 4, lanes)
        assert seconds("ring", limit + 1000, GIGABIT, 4, lanes) < seconds("direct", limit + 1000, GIGABIT, 4, lanes)


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
    assert predicted(8_000_000, memory, [3]) == pytest.approx(16e6 / 3 * 0.75e-9)
    # A rank alone on each of 4 nodes: nothing inside.
    assert predicted(8_000_000, memory, [1] * 4) == seconds("ring", 8_000_000, memory, 4)
    assert predicted(80_000, memory, [1] * 4) == seconds("direct", 80_000, memory, 4)
    # 2 lanes: each adds half of 8 MB once, on the node of 3 ranks twice.
    inside, between = 8e6 * 0.75e-9, seconds("ring", 4_000_000, memory, 4, lanes=2)
    assert predicted(8_000_000, memory, [2, 3, 2, 2]) == pytest.approx(inside + between)


def test_bucket_bytes_by_hand() -> None:
    assert bucket_bytes(DEFAULT, 4) == bucket_bytes(linked(set()), 1) == 4 * 2**20
    measured = linked(set())  # the fastest link has 104 MB/s
    slow = dataclasses.replace(measured, latency_seconds=1e-3)
    assert bucket_bytes(slow, 4) == 20 * 4 * 104_000  # 1 ms at 104 MB/s are 104 000 bytes
    # 6 ms of latency are a twentieth of 120 ms, in which 2 x 3/4 of the bucket go over the wire (at 104 MB/s).
    assert 6e-3 / (1.5 * bucket_bytes(slow, 4) / 104e6) == pytest.approx(1 / 20)
    assert bucket_bytes(measured, 4) == 2**20  # 416 000, were it not for the lower limit
    assert bucket_bytes(dataclasses.replace(measured, latency_seconds=1.0), 4) == 64 * 2**20


def test_compression_pays_by_hand() -> None:
    def profile(rate: float) -> Profile:
        return dataclasses.replace(linked(set()), codecs=(("bf16", rate),))

    # A byte takes 10 ns on the wire; half of it saves 5 ns; half of that may go to the codec: 2.5 ns, 400 MB/s.
    assert not pays("bf16", profile(399e6), 1)
    assert pays("bf16", profile(401e6), 1)
    # With 4 lanes each has a quarter of the link, and a core of its own.
    assert pays("bf16", profile(101e6), 4)
    assert not pays("int8", profile(1e12), 1)  # not measured
    assert not pays("bf16", dataclasses.replace(profile(1e12), nodes=()), 1)
