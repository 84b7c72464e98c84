"""The profile of a cluster: read back what was written, refuse what is damaged or another's; and what follows."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from mpitrain.allreduce.costs import bucket_bytes, native_below_bytes, pays, ring_from_bytes, seconds
from mpitrain.errors import ConfigError
from mpitrain.profile import DEFAULT, Profile, fingerprint, from_json, library_name, ring_order, to_json

PATH = "cluster.json"
REMEDY = f"Measure anew: mpitrain bench --save-profile {PATH}"
NODES = ("b", "a", "c")  # in the order of their ranks, which is not the alphabet's
HERE = fingerprint(["b", "a", "b", "a", "c"], [0, 1, 0, 1, 2], "MPICH Version: 5.0.2")
RATES = {"compiled": True, "encode_bytes_per_second": 3e9, "add_bytes_per_second": 6e9, "decode_bytes_per_second": 6e9}
MEASURED = {
    "latency_between_nodes_us": 40.0,
    "latency_inside_node_us": 0.5,
    "link_bytes_per_second": [[0.0, 117e6, 118e6], [116e6, 0.0, 119e6], [50e6, 115e6, 0.0]],
    "link_gbit": None,
    "copy_bytes_per_second": 5e9,
    "add_bytes_per_second": 4e9,
    "codecs": {"bf16": RATES},
    "small_allreduce_us": 60.0,
}
VERSIONS = {"mpitrain": "0.1.0"}
TEXT = to_json(MEASURED, NODES, HERE, VERSIONS)


def changed(**changes: Any) -> str:
    """The file with other `measured` values."""
    return to_json(MEASURED | changes, NODES, HERE, VERSIONS)


def refusal(text: str, here: dict[str, Any] = HERE) -> str:
    with pytest.raises(ConfigError) as caught:
        from_json(text, PATH, here)
    message = str(caught.value)
    assert message.startswith(f"the profile {PATH} ")
    assert message.endswith(REMEDY)
    return message


def test_what_was_written_is_read() -> None:
    profile = from_json(TEXT, PATH, HERE)
    assert profile == Profile(
        origin=PATH,
        latency_seconds=pytest.approx(40e-6),
        bytes_per_second=117e6,  # of 50, 115, 116, 117, 118, 119 the upper of the two in the middle
        links=((0.0, 117e6, 118e6), (116e6, 0.0, 119e6), (50e6, 115e6, 0.0)),
        nodes=NODES,
        codecs=(("bf16", pytest.approx(1.5e9)),),  # 1/3 + 1/6 + 1/6 = 2/3 ns a byte
    )
    assert profile.is_measured
    assert not DEFAULT.is_measured


def test_of_one_node() -> None:
    here = fingerprint(["a", "a"], [0, 0], "MPICH Version: 5.0.2")
    text = to_json(MEASURED | {"latency_between_nodes_us": None, "link_bytes_per_second": None}, ["a"], here, VERSIONS)
    profile = from_json(text, PATH, here)
    assert (profile.latency_seconds, profile.bytes_per_second) == (DEFAULT.latency_seconds, DEFAULT.bytes_per_second)
    assert profile.links == ()
    assert bucket_bytes(profile, 1) == 4 * 2**20


@pytest.mark.parametrize("place", range(20))
def test_torn(place: int) -> None:
    """The last place is one character before the closing bracket."""
    end = len(TEXT.rstrip()) - 1
    assert "is damaged" in refusal(TEXT[: end * place // 19])


@pytest.mark.parametrize(
    "text",
    ["", " ", "null", "[]", "3", '"profile"', "{}", '{"schema": 1}', "\0" * 100, '{"schema": 1, "fingerprint": []}'],
)
def test_of_something_else(text: str) -> None:
    assert "is damaged" in refusal(text)


@pytest.mark.parametrize("key", ["fingerprint", "measured", "nodes"])
@pytest.mark.parametrize("value", [None, 3, [], "x", {}])
def test_a_part_of_another_kind(key: str, value: object) -> None:
    content = json.loads(TEXT) | {key: value}
    message = refusal(json.dumps(content))
    assert "is damaged" in message or (key == "fingerprint" and "is of another cluster" in message)


def test_what_is_missing_is_named() -> None:
    less = {name: value for name, value in MEASURED.items() if name != "codecs"}
    assert "(KeyError('codecs'))" in refusal(to_json(less, NODES, HERE, VERSIONS))


@pytest.mark.parametrize(
    "changes",
    [
        {"link_bytes_per_second": [[0.0, 1e8], [1e8, 0.0]]},
        {"link_bytes_per_second": [[0.0, 1e8, 1e8], [1e8, 0.0], [1e8, 1e8, 0.0]]},
        {"link_bytes_per_second": [[0.0, 1e8, 1e8], [1e8, 0.0, 1e8], [1e8, 0.0, 0.0]]},
        {"link_bytes_per_second": [[0.0, 1e8, 1e8], [1e8, 0.0, 1e8], [1e8, -1e8, 0.0]]},
        {"link_bytes_per_second": [[0.0, 1e8, 1e8], [1e8, 0.0, 1e8], [1e8, float("nan"), 0.0]]},
        {"link_bytes_per_second": [[0.0, 1e8, 1e8], [1e8, 0.0, 1e8], [1e8, float("inf"), 0.0]]},
        {"link_bytes_per_second": [[0.0, 1e8, 1e8], [1e8, 0.0, 1e8], [1e8, "fast", 0.0]]},
        {"link_bytes_per_second": []},
        {"link_bytes_per_second": 3},
        {"latency_between_nodes_us": 0.0},
        {"latency_between_nodes_us": -1.0},
        {"latency_between_nodes_us": float("nan")},
        {"latency_between_nodes_us": None},
        {"latency_between_nodes_us": "short"},
        {"codecs": None},
        {"codecs": {"bf16": 3}},
        {"codecs": {"bf16": RATES | {"add_bytes_per_second": 0}}},
        {"codecs": {"bf16": {"encode_bytes_per_second": 1e9}}},
    ],
    ids=str,
)
def test_numbers_that_cannot_be(changes: dict[str, Any]) -> None:
    assert "is damaged" in refusal(changed(**changes))


def test_nodes_that_are_not_those_of_the_fingerprint() -> None:
    assert "is damaged" in refusal(to_json(MEASURED, ("b", "a", "x"), HERE, VERSIONS))


def test_another_format() -> None:
    assert "has format 2; this version reads 1" in refusal(TEXT.replace('"schema": 1', '"schema": 2'))


@pytest.mark.parametrize(
    ("here", "found"),
    [
        (fingerprint(["b", "a", "b", "a", "d"], [0, 1, 0, 1, 2], "MPICH Version: 5.0.2"), "hosts ['a', 'b', 'c']"),
        (fingerprint(["b", "a", "c"], [0, 1, 2], "MPICH Version: 5.0.2"), "ranks_per_node [2, 2, 1], here [1, 1, 1]"),
        (fingerprint(["b", "a", "b", "a", "c"], [0, 1, 0, 1, 2], "Open MPI v5.0.11"), "mpi MPICH Version: 5.0.2, here"),
    ],
)
def test_of_another_cluster(here: dict[str, Any], found: str) -> None:
    message = refusal(TEXT, here)
    assert "is of another cluster" in message
    assert found in message


def test_fingerprint_does_not_depend_on_the_order_of_ranks() -> None:
    mpi = "MPICH Version: 5.0.2"
    assert fingerprint(["c", "a", "a", "b", "b"], [0, 1, 1, 2, 2], mpi) == HERE
    assert {"hosts": ["a", "b", "c"], "ranks_per_node": [2, 2, 1], "mpi": mpi} == HERE


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: x\n\0", "MPICH Version: 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI x\0", "Open MPI v5.0.11"),
        ("Intel(R) MPI Library 2021.18 for Linux* OS\n\0", "Intel(R) MPI Library 2021.18 for Linux* OS"),
    ],
)
def test_library_name(text: str, name: str) -> None:
    assert library_name(text) == name


# -- what follows ---------------------------------------------------------------------------------------------------


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
