"""The syntax of --hosts, and how ranks are laid out over hosts."""

from __future__ import annotations

import pytest

from mpitrain.errors import ConfigError
from mpitrain.launch.placement import parse_hosts, place


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b-2.lab", {"a": "", "b-2.lab": ""}),
        ("a/cpu", {"a": "cpu"}),
        ("a/cpux3", {"a": "cpu cpu cpu"}),
        ("a/cuda:2", {"a": "cuda:2"}),
        ("a/cuda:0-2x2,b/cpu", {"a": "cuda:0 cuda:0 cuda:1 cuda:1 cuda:2 cuda:2", "b": "cpu"}),
        ("a/cuda:0,b/cpu,a/cuda:2x2", {"a": "cuda:0 cuda:2 cuda:2", "b": "cpu"}),
        ("x4/cpux4", {"x4": "cpu cpu cpu cpu"}),
    ],
)
def test_what_is_wanted(text: str, expected: dict[str, str]) -> None:
    by_host = parse_hosts(text)
    assert list(by_host) == list(expected)  # in the order in which they are named
    assert by_host == {host: tuple(devices.split()) for host, devices in expected.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin with the name of a host"),
        ("a,,b", "does not begin with the name of a host"),
        ("a b", "does not begin with the name of a host"),
        ("-a", "does not begin with the name of a host"),
        ("a,b,a", "a is named twice in --hosts a,b,a; for two ranks on each host say --ppn 2"),
        ("a,a/cpu", "a is named twice"),
        ("a/cpu,a", "a is named twice"),
        ("a/gpu", "'a/gpu' in --hosts a/gpu is no device that is known; known are a, a/cpu"),
        ("a/", "is no device"),
        ("a/cuda", "is no device"),
        ("a/cuda:", "is no device"),
        ("a/cuda:0-", "is no device"),
        ("a/cuda:0-1-2", "is no device"),
        ("a/cpu:0", "is no device"),
        ("a/cpu4", "is no device"),
        ("a/cpu-4", "cpu has no numbers"),
        ("a/cpux0", "asks for no rank"),
        ("a/cuda:3-1", "the devices 3-1 run backwards"),
        ("a/cpu,b", "b has none; for one rank on no device write b/cpu"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hosts(text)
    assert message in str(error.value)


def laid_out(hosts: str, num_ranks: int | None, ranks_per_host: int | None) -> dict[str, list[int]]:
    return {one.host: list(one.ranks) for one in place(parse_hosts(hosts), num_ranks, ranks_per_host)}


def test_ranks_go_to_hosts_in_blocks() -> None:
    assert laid_out("a,b", 4, None) == {"a": [0, 1], "b": [2, 3]}
    assert laid_out("a,b,c", 5, None) == {"a": [0, 1], "b": [2, 3], "c": [4]}
    assert laid_out("a,b", None, 2) == {"a": [0, 1], "b": [2, 3]}
    assert laid_out("a,b", 3, 2) == {"a": [0, 1], "b": [2]}
    assert laid_out("a/cpux3,b/cuda:1", None, None) == {"a": [0, 1, 2], "b": [3]}
    assert laid_out("a/cpux3,b/cuda:1", 4, None) == {"a": [0, 1, 2], "b": [3]}


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "ranks_per_host", "message"),
    [
        ("a,b", None, None, "how many ranks? Say -n N"),
        (
            "a,b",
            4,
            1,
            "4 ranks do not fit on 2 hosts with --ppn 1, which makes 2; leave out --ppn to spread them evenly",
        ),
        ("a,b,c", 2, None, "2 ranks leave nothing to do for c"),
        ("a,b,c", 4, 2, "4 ranks leave nothing to do for c"),
        ("a/cpux2,b/cpu", 4, None, "-n is 4, and the devices in --hosts are for 3 ranks"),
        ("a/cpux2", None, 2, "leave out --ppn"),
    ],
)
def test_numbers_that_contradict_each_other(
    hosts: str, num_ranks: int | None, ranks_per_host: int | None, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        laid_out(hosts, num_ranks, ranks_per_host)
    assert message in str(error.value)
