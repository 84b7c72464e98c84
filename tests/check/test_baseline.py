"""What has changed since a baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from check.made_up import seen
from mpitrain.check.check import NotHereError, Seen
from mpitrain.check.checks.baseline import drift, read_baseline, stable, write_baseline
from mpitrain.errors import ConfigError


def saw(**of_node2: object) -> Seen:
    made = seen(2)
    usual = {"python": "3.11.2", "seconds": 0.1}
    made.nodes = {
        "node1": {"login": usual},
        "node2": {"login": usual, "network": {"interfaces": {"eth0": link(1500)}}, **of_node2},
    }
    return made


def link(mtu_bytes: int, **fields: object) -> dict[str, object]:
    return {"mtu_bytes": mtu_bytes, "addresses": [], "temporary": [], **fields}


def changes(before: Seen, now: Seen) -> list[tuple[tuple[str, ...], str, str]]:
    now.cluster["baseline"] = stable(before)
    return [(one.where or (), one.observed, one.allowed) for one in drift(now, now.target.names)]


def test_nothing_has_changed() -> None:
    assert stable(saw())["node1"] == {"login.python": "3.11.2"}  # what comes and goes is left out
    assert changes(saw(), saw()) == []
    gone = saw(login={"failed": "login", "found": "No route to host"})
    del gone.nodes["node2"]["network"]
    assert changes(saw(), gone) == []  # a node that did not answer has not changed


def test_a_changed_a_new_and_a_missing_value() -> None:
    now = saw(network={"interfaces": {"eth0": link(1400), "wg0": link(1420)}})
    assert changes(saw(), now) == [
        (("node2",), "network.interfaces.eth0.mtu_bytes is 1400", "1500, as in the baseline"),
        (("node2",), "network.interfaces.wg0.mtu_bytes is 1420", "not there, as in the baseline"),
        (("node2",), "network.interfaces.wg0.addresses is []", "not there, as in the baseline"),
    ]
    gone = (("node2",), "network.interfaces.wg0.mtu_bytes is not there", "1420, as in the baseline")
    assert gone in changes(now, saw())


def test_containers_and_temporary_addresses_come_and_go() -> None:
    """So do the link-local addresses of a tunnel, which has another one at each start."""

    def having(temporary: str, *more: str, link_local: str = "fe80::1") -> Seen:
        eth0 = link(1500, addresses=["10.0.0.2/24", f"{temporary}/64"], temporary=[temporary])
        tunnel = link(1420, addresses=["10.213.0.2/16", f"{link_local}/64"])
        others = {name: link(1500) for name in more}
        return saw(network={"interfaces": {"eth0": eth0, "mpitrain": tunnel, **others}})

    before = having("2001:db8::ab", "veth12ab", "docker0", link_local="fe80::6cab:f5bc:e8ce:1e1b")
    assert changes(before, having("2001:db8::cd", "br-12ab", "vethcd")) == []
    now = having("2001:db8::cd")
    now.nodes["node2"]["network"]["interfaces"]["eth0"]["addresses"] = []
    (changed,) = changes(before, now)
    observed = "network.interfaces.eth0.addresses is []"
    assert changed[1:] == (observed, '["10.0.0.2/24"], as in the baseline')


def test_nodes_that_came_and_went() -> None:
    one = seen(1)
    one.nodes = {"node1": saw().nodes["node1"]}
    assert changes(one, saw()) == [(("node2",), "is not in the baseline", "")]
    assert changes(saw(), one) == [((), "node2 of the baseline is not in the inventory", "")]


def test_without_a_baseline() -> None:
    with pytest.raises(NotHereError):
        list(drift(saw(), ()))


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    write_baseline(path, saw())
    assert read_baseline(path) == stable(saw())
    for text in ("", "{}", "[]", '{"mpitrain_baseline": 2, "nodes": {}}', '{"mpitrain_baseline": 1, "nodes": [1]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"is not a baseline.*; --save-baseline"):
            read_baseline(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_baseline(tmp_path / "no/folder", saw())
