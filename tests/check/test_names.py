"""The judges of names, on made-up answers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from check.made_up import seen as made_up
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.run import judge
from mpitrain.launch.hostfile import Host

NODES = ("node1", "node2", "node3")
BLOCK = ["# BEGIN mpitrain cluster", *(f"10.0.0.{n} node{n}" for n in (1, 2, 3)), "# END mpitrain cluster"]


def healthy() -> Seen:
    seen = made_up(3)
    for number, name in enumerate(NODES, 1):
        lo = {"name": "lo", "is_up": True, "mac": "00:00:00:00:00:00", "addresses": ["127.0.0.1", "::1"]}
        eth0 = {"name": "eth0", "is_up": True, "mac": f"02:00:00:00:00:0{number}", "addresses": [f"10.0.0.{number}"]}
        seen.nodes[name] = {
            "resources": {"container": ""},
            "names": {
                "hostname": name,
                "resolved": {f"node{n}": [f"10.0.0.{n}"] for n in (1, 2, 3)},
                "hosts": ["127.0.0.1 localhost", "# mpitrain: 127.0.1.1 node1", *BLOCK],
                "set_up": True,
                "cloud_init": "",
                "links": [lo, eth0],
                "machine_id": f"{number:032x}",
                "host_keys": [f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIkey{number}"],
            },
        }
    return seen


def judged(name: str, seen: Seen) -> list[Result]:
    return [result for result in judge([CHECKS[name]], seen) if result.verdict != "pass"]


def only(name: str, seen: Seen, verdict: str, node: str, found: str, remedy: str = "") -> None:
    (result,) = judged(name, seen)
    assert (result.verdict, result.where) == (verdict, (node,))
    assert found in result.observed
    assert node not in result.observed
    assert remedy in result.remedy
    assert verdict not in ("warn", "fail") or (result.remedy and result.allowed)


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("NAM")])
def test_a_healthy_cluster(name: str) -> None:
    assert judged(name, healthy()) == []


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("NAM")])
def test_without_an_answer_nothing_is_known(name: str) -> None:
    seen = healthy()
    for sections in seen.nodes.values():
        sections["names"] = {"error": "no answer within 8 s"}
    assert {result.verdict for result in judge([CHECKS[name]], seen)} == {"unknown"}


def changed(node: str, **fields: Any) -> Seen:
    seen = deepcopy(healthy())
    seen.nodes[node]["names"].update(fields)
    return seen


def resolved(node: str, **addresses: Any) -> Seen:
    seen = healthy()
    seen.nodes[node]["names"]["resolved"].update(addresses)
    return seen


def test_the_host_name() -> None:
    assert judged("NAM01", changed("node2", hostname="node2.example.org")) == []
    repair = "ansible-playbook cluster/setup.yml --tags hosts --limit {limit} -e mpitrain_set_hostname=true"
    only("NAM01", changed("node2", hostname="worker"), "fail", "node2", "it calls itself worker", repair)


def test_the_own_name_on_loopback() -> None:
    for address in ("127.0.1.1", "::1"):
        seen = resolved("node3", node3=[address, "10.0.0.3"])
        only("NAM02", seen, "fail", "node3", f"its own name leads to {address}", "--tags hosts")
        assert judged("NAM03", seen) == []
    assert judged("NAM02", resolved("node3", node3=None))[0].verdict == "unknown"


def test_a_name_that_leads_elsewhere() -> None:
    seen = resolved("node1", node2=["10.9.9.9"])
    seen.nodes["node1"]["names"]["hosts"].insert(1, "10.9.9.9 gone node2 # old")
    line = "ssh 10.0.0.1 \"sudo sed -i '2s/^/# /' /etc/hosts\"  # the line: 10.9.9.9 gone node2 # old"
    only("NAM03", seen, "fail", "node1", "the name node2 leads to 10.9.9.9", line)
    only("NAM03", resolved("node1", node2=["10.9.9.9"]), "fail", "node1", "leads to 10.9.9.9", "nsswitch.conf")
    only("NAM03", resolved("node1", node2=[]), "fail", "node1", "the name node2 is not known", "--tags hosts")
    only("NAM03", resolved("node1", node2=None), "fail", "node1", "did not end", "resolv.conf")
    only("NAM03", resolved("node1", node2=["10.0.0.2", "fd00::2"]), "warn", "node1", "10.0.0.2, fd00::2")


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        (["127.0.0.1 localhost"], "/etc/hosts lacks the lines of set-up"),
        (BLOCK[:-1], "/etc/hosts lacks the lines of set-up"),
        ([*BLOCK[:2], "10.9.9.9 node2", *BLOCK[3:]], "have '10.9.9.9 node2' for node2"),
        ([*BLOCK[:2], *BLOCK[3:]], "have nothing for node2"),
        ([*BLOCK[:3], "10.9.9.9 node2", *BLOCK[3:]], "'10.0.0.2 node2' and '10.9.9.9 node2' for node2"),
    ],
)
def test_the_block_of_set_up(hosts: list[str], found: str) -> None:
    only("NAM04", changed("node1", hosts=hosts), "fail", "node1", found, "--tags hosts --limit")


def test_a_cluster_that_set_up_did_not_make_needs_no_block() -> None:
    only("NAM04", changed("node1", hosts=["127.0.0.1 localhost"], set_up=False), "skip", "node1", "did not write")


def test_cloud_init() -> None:
    only("NAM05", changed("node1", cloud_init=None), "skip", "node1", "no cloud-init")
    only(
        "NAM05",
        changed("node1", cloud_init="localhost"),
        "warn",
        "node1",
        "manage_etc_hosts: localhost",
        "--tags hosts",
    )
    assert judged("NAM05", changed("node1", cloud_init="False")) == []


def test_an_address_that_is_not_there() -> None:
    link = {"name": "eth0", "is_up": True, "mac": "", "addresses": ["192.168.5.5", "fe80::1"]}
    seen = changed("node2", links=[link])
    only("NAM06", seen, "fail", "node2", "10.0.0.2 is on none of its interfaces; they have 192.168.5.5", "ip address")
    link = {"name": "eth0", "is_up": False, "mac": "", "addresses": ["10.0.0.2"]}
    only(
        "NAM06", changed("node2", links=[link]), "fail", "node2", "eth0, which has its address, is down", "set eth0 up"
    )
    only("NAM06", changed("node2", links=[]), "unknown", "node2", "gives no interfaces")


@pytest.mark.parametrize(
    ("field", "value", "verdict", "what"),
    [
        ("machine_id", f"{1:032x}", "warn", "machine-id"),
        ("host_keys", ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIkey1"], "fail", "ssh host key"),
        ("links", [{"name": "e", "is_up": True, "mac": "02:00:00:00:00:01", "addresses": ["10.0.0.3"]}], "fail", "MAC"),
    ],
)
def test_a_copy(field: str, value: Any, verdict: str, what: str) -> None:
    results = judged("NAM07", changed("node3", **{field: value}))
    assert [(one.verdict, one.where) for one in results] == [(verdict, ("node1",)), (verdict, ("node3",))]
    assert results[0].observed == results[1].observed
    assert f"the same {what}" in results[0].observed
    assert results[0].remedy


def test_bridges_in_the_nodes_may_share_their_address() -> None:
    seen = healthy()
    for name in NODES:
        bridge = {"name": "docker0", "is_up": True, "mac": "02:42:00:00:00:01", "addresses": ["172.17.0.1"]}
        seen.nodes[name]["names"]["links"].append(bridge)
    assert judged("NAM07", seen) == []


def test_a_container_with_a_network_of_its_own() -> None:
    assert {result.verdict for result in judge([CHECKS["CON02"]], healthy())} == {"skip"}
    seen = healthy()
    seen.nodes["node2"]["resources"]["container"] = "docker"
    assert [one.where for one in judged("CON02", seen)] == [("node1",), ("node3",)]
    seen.nodes["node2"]["names"]["links"][1]["addresses"] = ["172.17.0.2"]
    (failed,) = (one for one in judged("CON02", seen) if one.verdict == "fail")
    assert "it has 172.17.0.2, not 10.0.0.2" in failed.observed
    assert "--network host" in failed.remedy


def test_its_own_name_is_not_known() -> None:
    only("NAM02", resolved("node3", node3=[]), "fail", "node3", "its own name is not known", "--tags hosts")
    seen = changed("node3", hostname="other")
    seen.nodes["node3"]["names"]["resolved"]["other"] = []
    only("NAM02", seen, "fail", "node3", "the name that it calls itself is not known", "mpitrain_set_hostname=true")


def test_a_node_that_was_named_by_its_address() -> None:
    seen = changed("node3", hostname="box")
    host = Host("10.0.0.3", "10.0.0.3")
    seen.target = replace(seen.target, hosts=(*seen.target.hosts[:2], host))
    seen.nodes["10.0.0.3"] = seen.nodes.pop("node3")
    seen.nodes["10.0.0.3"]["names"]["resolved"]["10.0.0.3"] = ["10.0.0.3"]
    (one,) = (one for one in judged("NAM01", seen) if one.where == ("10.0.0.3",))
    assert (one.verdict, one.observed) == ("skip", "it was named by its address")


@pytest.mark.parametrize(
    "fields", [{"machine_id": f"{1:032x}"}, {"host_keys": ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIkey1"]}]
)
def test_an_identity_is_removed_on_the_nodes_but_one(fields: dict[str, Any]) -> None:
    one, other = judged("NAM07", changed("node3", **fields))
    assert one.remedy == other.remedy  # so both are one finding
    assert one.remedy.startswith("ssh 10.0.0.3 'sudo rm ")


def test_a_container_without_ip() -> None:
    seen = changed("node2", links=[])
    seen.nodes["node2"]["resources"]["container"] = "docker"
    (one,) = (one for one in judged("CON02", seen) if one.where == ("node2",))
    assert (one.verdict, one.observed) == ("unknown", "`ip -j address` gives no interfaces")
