"""The syntax of --hosts, and how ranks are laid out over hosts."""

from __future__ import annotations

import pytest

from mpitrain.errors import ConfigError
from mpitrain.launch.placement import Place, Placement, names_devices, parse_hosts, place, refuse_crowds


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
        ("a,b,a", "a is named twice in --hosts a,b,a; for two ranks on each host, use --ppn 2"),
        ("a,a/cpu", "a is named twice"),
        ("a/cpu,a", "a is named twice"),
        ("a/gpu", "'a/gpu' in --hosts a/gpu is not a known form; known are a, a:4, a/cpu"),
        ("a/", "is not a known form"),
        ("a/cuda", "is not a known form"),
        ("a/cuda:", "is not a known form"),
        ("a/cuda:0-", "is not a known form"),
        ("a/cuda:0-1-2", "is not a known form"),
        ("a/cpu:0", "is not a known form"),
        ("a/cpu4", "is not a known form"),
        ("a/cpu-4", "cpu takes no numbers"),
        ("a/cpux0", "asks for no rank"),
        ("a/cuda:3-1", "the devices 3-1 run backwards"),
        ("a/cpu,b", "b has none; for one rank on no device, write b/cpu"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hosts(text)
    assert message in str(error.value)


def laid_out(hosts: str, num_ranks: int | None, ranks_per_host: int | None = None) -> dict[str, list[int]]:
    return {one.host: list(one.ranks) for one in place(parse_hosts(hosts), num_ranks, ranks_per_host)}


def test_ranks_go_to_hosts_in_blocks() -> None:
    assert laid_out("a,b", 4) == {"a": [0, 1], "b": [2, 3]}
    assert laid_out("a,b,c", 5) == {"a": [0, 1], "b": [2, 3], "c": [4]}
    assert laid_out("a,b", None, 2) == {"a": [0, 1], "b": [2, 3]}
    assert laid_out("a,b", 3, 2) == {"a": [0, 1], "b": [2]}
    assert laid_out("a/cpux3,b/cuda:1", None) == {"a": [0, 1, 2], "b": [3]}
    assert laid_out("a/cpux3,b/cuda:1", 4) == {"a": [0, 1, 2], "b": [3]}
    # Numbers of ranks as for mpiexec.
    assert laid_out("a:4,b:2", None) == laid_out("a:4,b:2", 6) == {"a": [0, 1, 2, 3], "b": [4, 5]}
    assert laid_out("a:4,b", None) == laid_out("a:4,b:2", 5) == {"a": [0, 1, 2, 3], "b": [4]}
    assert laid_out("a:4,b:2", 3) == {"a": [0, 1, 2]}
    assert laid_out("a:1", None) == {"a": [0]}
    assert not any(one.devices for one in place(parse_hosts("a:4,b:2"), None, None))
    assert not names_devices(parse_hosts("a:4,b:2"))


MANY = "ranks on {} are too many: allowed are at most 16384 on the largest machine. "


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "ranks_per_host", "message"),
    [
        ("a:0", None, None, "'a:0' in --hosts a:0 does not end in a number of ranks above 0"),
        ("a:,b", None, None, "'a:' in --hosts a:,b does not end in a number of ranks above 0"),
        ("a:2/cpu", None, None, "'a:2/cpu' in --hosts a:2/cpu is not a known form"),
        ("a:2,b/cpu", None, None, "some hosts have devices and a has none"),
        ("a:2,a:1", None, None, "a is named twice"),
        ("a:2,b:2", 5, None, "-n is 5, and the hosts have room for 4 ranks"),
        ("a:2,b:2", None, 1, "the hosts are given with their numbers of ranks; leave out --ppn"),
        ("a:99999", None, None, "99999 ranks on a:99999 are too many"),
        ("a,b", None, None, "how many ranks? Say -n N"),
        (
            "a,b",
            4,
            1,
            "4 ranks do not fit on 2 hosts with --ppn 1, which makes 2; leave out --ppn to spread them evenly",
        ),
        ("a,b,c", 2, None, "with 2 ranks, c would have none"),
        ("a,b,c", 4, 2, "with 4 ranks, c would have none"),
        ("a/cpux2,b/cpu", 4, None, "-n is 4, but the devices in --hosts are for 3 ranks"),
        ("a/cpux2", None, 2, "leave out --ppn"),
        ("a", 10**20, None, f"{10**20} {MANY.format('a')}"),
        ("a,b", None, 10**20, f"{10**20} {MANY.format('a')}"),
        ("a/cpux20000", None, None, f"20000 {MANY.format('a/cpux20000')}"),
        ("a/cuda:0-99999", None, None, f"100000 {MANY.format('a/cuda:0-99999')}"),
        (
            "a/cpux99999999999999",
            None,
            None,
            "'a/cpux99999999999999' in --hosts a/cpux99999999999999 is not a known form; ",
        ),
    ],
)
def test_numbers_of_ranks_that_are_refused(
    hosts: str, num_ranks: int | None, ranks_per_host: int | None, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        laid_out(hosts, num_ranks, ranks_per_host)
    assert message in str(caught.value)


def test_more_than_a_host_can_hold() -> None:
    """The small ranks of a learner are accepted on a small machine."""
    places = place(parse_hosts("a,b"), 128, None)
    refuse_crowds(places, {"a": 2, "b": 2})
    refuse_crowds(places, {"a": 4, "b": 1})
    places = place(parse_hosts("a,b"), 162, None)
    refuse_crowds(places, {"a": 6, "b": 6})
    with pytest.raises(ConfigError) as caught:
        refuse_crowds(places, {"a": 6, "b": 5})
    assert str(caught.value) == (
        "81 ranks on b are too many: it has 5 cores, and allowed are at most 80 ranks there (16 per core, and 64 on "
        "every machine). Ask for fewer with -n or --ppn, or name more hosts with --hosts"
    )


def test_some_hosts_first() -> None:
    placement = Placement((Place("a", 0, 2), Place("b", 2, 1), Place("c", 3, 2)), {"a": "1", "b": "2", "c": "3"}, "a")
    led = placement.led_by(("c", "b"))
    assert led.places == (Place("b", 0, 1), Place("c", 1, 2), Place("a", 3, 2))
    assert (led.addresses, led.own) == (placement.addresses, "a")
    assert led.first(2).hosts == ("b", "c")
