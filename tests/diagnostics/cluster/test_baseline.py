"""What has changed since a baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnostics.cluster.made_up import seen
from mpitrain.diagnostics.cluster.baseline import drift, read_baseline, stable, write_baseline
from mpitrain.diagnostics.cluster.check import NotHereError, Seen
from mpitrain.errors import ConfigError


def saw(**of_node2: object) -> Seen:
    made = seen(2)
    usual = {"python": "3.11.2", "seconds": 0.1}
    made.nodes = {
        "node1": {"login": usual},
        "node2": {"login": usual, "network": {"interfaces": {"eth0": {"mtu_bytes": 1500}}}, **of_node2},
    }
    return made


def changes(before: Seen, now: Seen) -> list[tuple[tuple[str, ...], str, str]]:
    now.cluster["baseline"] = stable(before)
    return [(one.where, one.found, one.allowed) for one in drift(now, now.target.names)]


def test_what_comes_and_goes_is_left_out() -> None:
    assert stable(saw())["node1"] == {"login.python": "3.11.2"}


def test_nothing_has_changed() -> None:
    assert changes(saw(), saw()) == []


def test_a_changed_a_new_and_a_missing_value() -> None:
    now = saw(network={"interfaces": {"eth0": {"mtu_bytes": 1400}, "docker0": {"mtu_bytes": 1500}}})
    assert changes(saw(), now) == [
        (("node2",), "network.interfaces.eth0.mtu_bytes is 1400", "1500, as in the baseline"),
        (("node2",), "network.interfaces.docker0.mtu_bytes is 1500", "not there, as in the baseline"),
    ]
    assert (("node2",), "network.interfaces.docker0.mtu_bytes is not there", "1500, as in the baseline") in changes(
        now, saw()
    )


def test_nodes_that_came_and_went() -> None:
    one = seen(1)
    one.nodes = {"node1": saw().nodes["node1"]}
    assert changes(one, saw()) == [(("node2",), "is not in the baseline", "")]
    assert changes(saw(), one) == [((), "node2 of the baseline is not in the inventory", "")]


def test_a_node_that_did_not_answer_has_not_changed() -> None:
    gone = saw()
    gone.nodes["node2"] = {"login": {"failed": "login", "found": "No route to host"}}
    assert changes(saw(), gone) == []


def test_without_a_baseline() -> None:
    with pytest.raises(NotHereError):
        list(drift(saw(), ()))


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    write_baseline(path, saw())
    assert read_baseline(path) == stable(saw())
    for text in ("", "{}", "[]", '{"mpitrain_baseline": 2, "nodes": {}}', '{"mpitrain_baseline": 1, "nodes": [1]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is none; --save-baseline"):
            read_baseline(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_baseline(tmp_path / "no/folder", saw())
