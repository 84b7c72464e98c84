"""The judges of the tunnel between the nodes, and of the addresses of its nodes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from check.made_up import SET_UP, judged, only, seen, sound
from jobs import REPOSITORY
from mpitrain.check.check import Result, Seen
from mpitrain.check.target import find_target, tunnel_address
from mpitrain.errors import ConfigError


def looked(wanted: bool = True, **of_node2: Any) -> Seen:
    """Three nodes with a correct tunnel, except for the given values of the second."""
    made = seen(3, settings={"mpitrain_wireguard": wanted})
    keys = {address: f"key of {name}" for name, address in made.target.addresses.items()}
    for name, address in made.target.addresses.items():
        peers = {other: key for other, key in keys.items() if other != address}
        tunnel = {"is_known": True, "is_set_up": True, "addresses": [address], "key": keys[address], "peers": peers}
        made.nodes[name] = {"tunnel": {**tunnel, "gate": "closed"}}
    made.nodes["node2"]["tunnel"].update(of_node2)
    return made


def test_a_tunnel_as_it_should_be() -> None:
    """The same holds on the head, which has no group_vars."""
    for id_ in ("WGD01", "WGD02"):
        sound(id_, looked(True), looked(False))


@pytest.mark.parametrize(
    ("tunnel", "words", "tag"),
    [
        ({"is_set_up": False}, "there is no tunnel, but mpitrain_wireguard is true", "wireguard"),
        ({"addresses": []}, "the tunnel is down", "wireguard --limit {limit}"),
        ({"addresses": ["10.0.0.9"]}, "the tunnel has the address 10.0.0.9", "wireguard --limit {limit}"),
        ({"key": "new"}, "the tunnel runs with a key that node1, node3 do not know", "wireguard"),
    ],
)
def test_a_tunnel_that_leads_nowhere(tunnel: dict[str, Any], words: str, tag: str) -> None:
    one = only("WGD01", looked(**tunnel), "fail", "node2", words)
    assert (one.observed, one.remedy) == (words, f"ansible-playbook cluster/setup.yml --tags {tag}")


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (["10.213.0.2"], "there is a tunnel, with the address 10.213.0.2, but mpitrain_wireguard is false"),
        ([], "the tunnel is down"),
    ],
)
def test_a_tunnel_that_no_setting_asks_for(addresses: list[str], words: str) -> None:
    """Set-up would remove the tunnel. It must do so on all nodes, never on one."""
    one = only("WGD01", looked(False, addresses=addresses), "fail", "node2", words)
    line, _, comment = one.remedy.partition("  # ")
    assert line == "ansible-playbook cluster/setup.yml --tags wireguard"
    assert ("mpitrain_wireguard: true" in comment) == bool(addresses)


def test_a_node_that_has_not_learnt_a_key() -> None:
    """A node that is down or was not seen says nothing about the keys of others."""
    made = looked()
    del made.nodes["node3"]["tunnel"]["peers"]["10.0.0.2"]
    only("WGD01", made, "fail", "node2", "the tunnel runs with a key that node3 does not know")
    made = looked(addresses=[], key="", peers={})
    assert [one.where for one in judged("WGD01", made)] == [("node2",)]


@pytest.mark.parametrize(("gate", "words"), [("open", "has no table inet mpitrain"), ("changed", "was changed")])
def test_a_gate_that_is_not_closed(gate: str, words: str) -> None:
    only("WGD02", looked(gate=gate), "fail", "node2", words, SET_UP.format(tag="gate"))


def test_no_tunnel_and_no_sudo() -> None:
    nothing = {"is_set_up": False, "addresses": [], "key": "", "peers": {}, "gate": "open"}
    for id_ in ("WGD01", "WGD02"):
        (one,) = (one for one in judged(id_, looked(wanted=False, **nothing)) if one.where == ("node2",))
        assert one.verdict == "skip" and "without a tunnel" in one.observed
        (one,) = (one for one in judged(id_, looked(is_known=False)) if one.where == ("node2",))
        assert one.verdict == "skip" and "sudo" in one.observed


def test_the_share_is_exported_to_the_tunnel_alone() -> None:
    def exported(client: str, wanted: bool) -> list[Result]:
        made = looked(wanted)
        if not wanted:
            for name in made.target.names:
                made.nodes[name]["tunnel"]["is_set_up"] = False
        for name, address in made.target.addresses.items():
            made.nodes[name]["names"] = {"links": [{"addresses": [address, "192.168.1.2"]}]}
        made.nodes["node1"]["serving"] = {"exports": [{"path": "/home/cluster/nfs", "client": client, "options": []}]}
        return judged("NFS06", made)

    assert exported("10.0.0.2", wanted=True) == []
    (one,) = exported("192.168.1.2", wanted=True)  # its own address, but outside the tunnel: anybody may have it
    assert (one.verdict, one.observed) == ("warn", "/home/cluster/nfs is exported to 192.168.1.2")
    assert exported("192.168.1.2", wanted=False) == []


INVENTORY = "[head]\na ansible_host=192.168.1.11\n[workers]\nb ansible_host=192.168.1.12\n"


def test_the_nodes_are_known_by_the_tunnels_addresses_and_logged_in_to_by_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/all.yml").write_text("mpitrain_wireguard: true\nmpitrain_wireguard_network: 10.7.0.0/16\n")
    (tmp_path / "hosts").write_text(f"{INVENTORY}[cluster:children]\nhead\nworkers\n")
    monkeypatch.chdir(tmp_path)
    target = find_target(Path("hosts"), None, None, {})
    assert target.addresses == {"a": "10.7.1.11", "b": "10.7.1.12"}
    assert (target.login("b"), target.destination("b"), target.known_as("b")) == ("192.168.1.12",) * 3
    assert find_target(Path("hosts"), "b", None, {}).addresses == {"a": "10.7.1.11", "b": "10.7.1.12"}
    (tmp_path / "group_vars/all.yml").write_text("mpitrain_wireguard: true\nmpitrain_wireguard_network: 10.7.1.0/16\n")
    with pytest.raises(ConfigError, match=r"mpitrain_wireguard_network: .* has host bits set"):
        find_target(Path("hosts"), None, None, {})


@pytest.mark.parametrize(
    ("address", "network", "within"),
    [
        ("192.168.1.11", "10.213.0.0/16", "10.213.1.11"),
        ("10.1.2.3", "172.20.4.0/24", "172.20.4.3"),
        ("10.1.2.203", "172.20.4.64/26", "172.20.4.75"),  # 203 = 3 * 64 + 11
        ("fd00::1:f", "10.213.0.0/16", "10.213.0.15"),
        ("10.213.1.11", "10.213.0.0/16", "10.213.1.11"),  # from the inventory that set-up leaves on the nodes
    ],
)
def test_the_check_and_the_playbooks_mean_the_same_address(address: str, network: str, within: str) -> None:
    path = REPOSITORY / "cluster/playbooks/roles/mpitrain_facts/filter_plugins/mpitrain_addresses.py"
    spec = importlib.util.spec_from_file_location("mpitrain_addresses", path)
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    assert tunnel_address(address, network) == plugin.tunnel_address(address, network) == within
    assert plugin.addresses({"a": address}, "") == {"a": address}
