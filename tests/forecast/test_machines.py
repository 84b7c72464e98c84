"""The file of machines, and the profile of a cluster; and that a mistake is refused with its line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.forecast.machines import Machines, equal_machines, from_profile, read_machines
from mpitrain.profile import fingerprint, to_json

WHOLE = """\
[nodes]
count = 6
gbit = 1
latency_us = 20
ranks = 2

[inside]
gbyte = 8
latency_us = 0.5

[racks]
nodes = 4
uplink_gbit = 2

[memory]
add_gbyte = 3
copy_gbyte = 6

[[unequal]]
nodes = [1]
gbit = 0.1

[[unequal]]
nodes = [4, 5]
speed = 0.5
"""


def test_the_whole_file(tmp_path: Path) -> None:
    machines = read(tmp_path, WHOLE)
    assert machines.num_ranks == 12
    assert machines.link_bytes_per_second == (125e6, 12.5e6, 125e6, 125e6, 125e6, 125e6)
    assert machines.latency_seconds == pytest.approx(20e-6)
    assert machines.speeds == (1, 1, 1, 1, 0.5, 0.5)
    assert (machines.inside_bytes_per_second, machines.inside_latency_seconds) == (8e9, pytest.approx(0.5e-6))
    assert (machines.rack_of(machines.num_nodes - 1), machines.uplink_bytes_per_second) == (1, 250e6)
    assert [machines.rack_of(node) for node in range(6)] == [0, 0, 0, 0, 1, 1]
    assert (machines.costs.add_bytes_per_second, machines.costs.copy_bytes_per_second) == (3e9, 6e9)
    assert machines.nodes_of(5) == (0, 0, 1, 1, 2)


def test_what_is_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, "nodes = {count = 3, gbit = 0.936}") == equal_machines(
        3, bytes_per_second=117e6, origin=str(tmp_path / "lab.toml")
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("nodes = 4\n", "nodes = 6\n", "line 12: a rack has 6 nodes, and there are only 6 nodes: no message passes an"),
        ("nodes = [1]", "nodes = [6]", "line 20: there is no node 6: the nodes are 0 to 5"),
        ("nodes = [4, 5]", "nodes = [4, 1]", "line 24: node 1 is in line 20 already"),
        ("nodes = [4, 5]", "nodes = [4, 4]", "line 24: node 4 is in line 24 already"),
        ("nodes = [4, 5]", "nodes = 4", "line 24: nodes is 4; give numbers of nodes, such as [3, 4]"),
        ("speed = 0.5", "", "line 24: nodes without gbit or speed are as all others"),
        ("speed = 0.5", "speed = 0", "line 25: speed is 0; it must be a number from 1e-06 to 1e6"),
        ("speed = 0.5", "speed = nan", "line 25: speed is nan; it must be a number from 1e-06 to 1e6"),
        ("gbit = 0.1", "gbit = 0.1\nlatency_us = 3", "line 22: unequal has no 'latency_us'; known: nodes, gbit, speed"),
        ("count = 6", "count = 0", "line 2: count is 0; it must be a whole number from 1 to 65536"),
        ("count = 6", "count = true", "line 2: count is True; it must be a whole number from 1 to 65536"),
        ("count = 6\n", "", "line 1: nodes needs count"),
        ("ranks = 2", "ranks = 2.5", "line 5: ranks is 2.5; it must be a whole number from 1 to 1024"),
        ("latency_us = 20", "latency_us = -1", "line 4: latency_us is -1; it must be a number from 0 to 1e6"),
        ("uplink_gbit = 2\n", "", "line 11: racks needs uplink_gbit"),
        ("[memory]", "[memroy]", "line 15: there is no table 'memroy'; known: nodes, inside, racks, memory, unequal"),
        ("[memory]", "[[memory]]", "line 15: memory must be a table, [memory]"),
        ("[inside]", "[inside", "is not TOML: "),
    ],
)
def test_a_mistake_is_refused_with_its_line(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert WHOLE.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, WHOLE.replace(old, new))
    assert problem in str(caught.value)
    assert str(tmp_path / "lab.toml") in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_machines(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"the table \[nodes\] is missing, with count and gbit"):
        read(tmp_path, "")


def test_room_for_ranks() -> None:
    machines = equal_machines(3, ranks_per_node=2)
    for number in (0, 7):
        with pytest.raises(ConfigError, match=f"{number} ranks were asked for; .* has room for 1 to 6: 3 nodes with 2"):
            machines.nodes_of(number)


def profile_text(hosts: list[str], node_ranks: list[int]) -> str:
    number = len(set(node_ranks))
    links = [[1e8 + 1e6 * (3 * i + j) if i != j else 0.0 for j in range(number)] for i in range(number)]
    measured = {
        "codecs": {"int8": {f"{name}_bytes_per_second": 3e9 for name in ("encode", "add", "decode")}},
        "add_bytes_per_second": 2e9, "copy_bytes_per_second": 4e9, "native_below_bytes": 1024,
        "latency_between_nodes_us": 40.0 if number > 1 else None,
        "link_bytes_per_second": links if number > 1 else None,
    }  # fmt: skip
    here = fingerprint(hosts, node_ranks, "MPICH 5.0.2")
    return to_json(measured, sorted(set(hosts)), here, {})


def test_a_measured_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_text(["a", "a", "b", "b", "c", "c"], [0, 0, 1, 1, 2, 2]))
    machines = from_profile(path)
    assert (machines.num_nodes, machines.ranks_per_node, machines.hosts) == (3, 2, ("a", "b", "c"))
    # The links: 101 and 102 from a, 103 and 105 from b, 106 and 107 from c.
    assert machines.link_bytes_per_second == (106e6, 107e6, 107e6)
    assert machines.pair_bytes_per_second(2, 0) == 106e6
    assert math.isinf(machines.pair_bytes_per_second(1, 1))
    assert machines.latency_seconds == pytest.approx(40e-6)
    assert machines.costs.add_bytes_per_second == 2e9
    assert dict(machines.costs.codecs) == {"int8": pytest.approx(1e9)}
    assert machines.profile(2).links == ((0.0, 101e6), (103e6, 0.0))


def test_profiles_that_say_too_little(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"^the profile .* (is damaged|cannot be read): .*bench --save-profile"):
        from_profile(path)
    path.write_text(profile_text(["a", "a"], [0, 0]))
    with pytest.raises(ConfigError, match="of one node, and says nothing of a network"):
        from_profile(path)
    path.write_text(profile_text(["a", "a", "b"], [0, 0, 1]))
    with pytest.raises(ConfigError, match=r"has \[1, 2\] ranks on its nodes"):
        from_profile(path)
    content = json.loads(path.read_text())
    content["schema"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="has format 1; this version reads 2"):
        from_profile(path)


def read(folder: Path, text: str) -> Machines:
    path = folder / "lab.toml"
    path.write_text(text)
    return read_machines(path)
