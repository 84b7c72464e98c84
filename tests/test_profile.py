"""The profile of a cluster: read back what was written, refuse what is damaged or another's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpitrain.allreduce.costs import bucket_bytes, native_below_bytes
from mpitrain.errors import ConfigError
from mpitrain.launch.placement import parse_hosts, place
from mpitrain.profile import DEFAULT, Profile, fingerprint, from_json, library_name, measure_anew, to_json

PATH = "cluster.json"
NODES = ("b", "a", "c")  # in the order of their ranks, which is not the alphabet's
HERE = fingerprint(["b", "a", "b", "a", "c"], [0, 1, 0, 1, 2], "MPICH Version: 5.0.2")
RATES = {"compiled": True, "encode_bytes_per_second": 3e9, "add_bytes_per_second": 6e9, "decode_bytes_per_second": 6e9}
MEASURED = {
    "latency_between_nodes_us": 40.0,
    "link_bytes_per_second": [[0.0, 117e6, 118e6], [116e6, 0.0, 119e6], [50e6, 115e6, 0.0]],
    "copy_bytes_per_second": 6e9,
    "add_bytes_per_second": 4e9,
    "codecs": {"bf16": RATES},
    "native_below_bytes": 32768,
}
VERSIONS = {"mpitrain": "0.1.0"}
TEXT = to_json(MEASURED, NODES, HERE, VERSIONS)


def refusal(text: str, here: dict[str, Any] = HERE) -> str:
    with pytest.raises(ConfigError) as caught:
        from_json(text, PATH, here)
    message = str(caught.value)
    assert message.startswith(f"the profile {PATH} ")
    assert message.endswith(measure_anew(PATH, here))
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
        add_bytes_per_second=4e9,
        copy_bytes_per_second=6e9,
        native_below_bytes=32768,
    )
    assert profile.is_measured
    assert not DEFAULT.is_measured


def test_of_one_node() -> None:
    here = fingerprint(["a", "a"], [0, 0], "MPICH Version: 5.0.2")
    text = to_json(MEASURED | {"latency_between_nodes_us": None, "link_bytes_per_second": None}, ["a"], here, VERSIONS)
    profile = from_json(text, PATH, here)
    assert (profile.latency_seconds, profile.bytes_per_second) == (DEFAULT.latency_seconds, DEFAULT.bytes_per_second)
    assert profile.links == ()
    assert (profile.add_bytes_per_second, profile.copy_bytes_per_second) == (4e9, 6e9)
    assert native_below_bytes(profile, 1) == 32768
    assert bucket_bytes(profile, 1) == 4 * 2**20


def test_of_one_node_with_something_between_nodes() -> None:
    here = fingerprint(["a", "a"], [0, 0], "MPICH Version: 5.0.2")
    nothing = {"latency_between_nodes_us": None, "link_bytes_per_second": None}
    latency, links = {"latency_between_nodes_us": 40.0}, {"link_bytes_per_second": [[0.0]]}
    for changes in (latency, links, latency | links):
        assert "is damaged" in refusal(to_json(MEASURED | nothing | changes, ["a"], here, VERSIONS), here)


def test_torn() -> None:
    """The last place is one character before the closing bracket."""
    end = len(TEXT.rstrip()) - 1
    for part in range(20):
        assert "is damaged" in refusal(TEXT[: end * part // 19])


@pytest.mark.parametrize(
    "text",
    ["", " ", "null", "[]", "3", '"profile"', "{}", '{"schema": 2}', "\0" * 100, '{"schema": 2, "fingerprint": []}']
    + ["[" * 200_000],
    ids=lambda text: repr(text[:40]),
)
def test_of_something_else(text: str) -> None:
    assert "is damaged" in refusal(text)


@pytest.mark.parametrize("key", ["fingerprint", "measured", "nodes"])
def test_a_part_of_another_kind(key: str) -> None:
    for value in (None, 3, [], "x", {}):
        message = refusal(json.dumps(json.loads(TEXT) | {key: value}))
        assert "is damaged" in message or (key == "fingerprint" and "is of another cluster" in message)


@pytest.mark.parametrize(
    ("hosts", "node_ranks", "options"),
    [
        ("bab", [0, 1, 0], "--hosts a/cpux1,b/cpux2"),
        ("ab", [0, 1], "--hosts a,b --ppn 1"),
        ("aaa", [0, 0, 0], "--hosts localhost -n 3"),
    ],
)
def test_the_remedy_measures_these_hosts(hosts: str, node_ranks: list[int], options: str) -> None:
    here = fingerprint(hosts, node_ranks, "MPICH Version: 5.0.2")
    advice = measure_anew("my file", here)
    assert advice == f"Measure again: mpitrain bench {options} --save-profile 'my file'"
    # It is of as many ranks on as many hosts.
    words = dict(zip(options.split()[::2], options.split()[1::2], strict=True))
    places = place(
        parse_hosts(words["--hosts"]), *(int(words[name]) if name in words else None for name in ("-n", "--ppn"))
    )
    assert [one.num_ranks for one in places] == here["ranks_per_node"]


def test_what_is_missing_or_of_another_format() -> None:
    less = {name: value for name, value in MEASURED.items() if name != "codecs"}
    assert "is damaged: it has no 'codecs'." in refusal(to_json(less, NODES, HERE, VERSIONS))
    assert "is damaged" in refusal(to_json(MEASURED, ("b", "a", "x"), HERE, VERSIONS))  # not of the fingerprint
    assert "has format 1; this version reads 2" in refusal(TEXT.replace('"schema": 2', '"schema": 1'))


def links(last: Any) -> list[list[Any]]:
    return [[0.0, 1e8, 1e8], [1e8, 0.0, 1e8], [1e8, last, 0.0]]


# Of a measured number, or of a number of a codec: what it cannot be, and what is said of it.
OUT_OF_RANGE = "5e-324 is not a number from "
IMPOSSIBLE: dict[str, list[tuple[Any, str]]] = {
    "link_bytes_per_second": [
        *((links(last), "") for last in (0.0, -1e8, float("nan"), float("inf"), "fast", "1e8", True)),
        ([[0.0, 1e8], [1e8, 0.0]], ""),
        ([[0.0, 1e8, 1e8], [1e8, 0.0], [1e8, 1e8, 0.0]], ""),
        *((value, "") for value in ([], 3, None)),
    ],
    "latency_between_nodes_us": [
        *((value, "") for value in (0.0, -1.0, float("nan"), None, "short", "40", True, 10**400)),
        (5e-324, f"{OUT_OF_RANGE}0.001 to 1e+09"),
    ],
    "codecs": [(None, ""), ({"bf16": 3}, ""), ({"bf16": {"encode_bytes_per_second": 1e9}}, "")],
    "add_bytes_per_second": [(0, ""), (5e-324, f"{OUT_OF_RANGE}1 to 1e+16")],
    "copy_bytes_per_second": [("6e9", ""), (1e300, "1e+300 is not a number from 1 to 1e+16")],
    "native_below_bytes": [
        *((value, "") for value in (-1, 4096.0, None, True)),
        (2**63, f"{2**63} is not a number of bytes"),
    ],
    "bf16's add_bytes_per_second": [(0, ""), (5e-324, f"{OUT_OF_RANGE}1 to 1e+16")],
    "bf16's decode_bytes_per_second": [(-1, "")],
    "bf16's encode_bytes_per_second": [(float("inf"), ""), ("3e9", ""), (True, "")],
}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [(name, *row) for name, rows in IMPOSSIBLE.items() for row in rows],
    ids=lambda word: str(word)[:60],
)
def test_numbers_that_cannot_be(name: str, value: Any, why: str) -> None:
    of_codec = name.removeprefix("bf16's ")
    changes = {name: value} if of_codec == name else {"codecs": {"bf16": RATES | {of_codec: value}}}
    assert f"is damaged: {why}" in refusal(to_json(MEASURED | changes, NODES, HERE, VERSIONS))


def test_nothing_measured_between_several_nodes() -> None:
    nothing = {"link_bytes_per_second": None, "latency_between_nodes_us": None}
    assert "is damaged" in refusal(to_json(MEASURED | nothing, NODES, HERE, VERSIONS))


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
