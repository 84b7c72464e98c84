"""The judges of names, on made-up answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from check.made_up import judged, of_each, only, sound, verdicts
from mpitrain.check.check import Seen
from mpitrain.check.checks import CHECKS
from mpitrain.launch.hostfile import Host

NODES = ("node1", "node2", "node3")
BLOCK = ["# BEGIN mpitrain cluster", *(f"10.0.0.{n} node{n}" for n in (1, 2, 3)), "# END mpitrain cluster"]
LOCAL = "127.0.0.1 localhost"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIkey"


def link(*addresses: str, name: str = "eth0", mac: str = "", is_up: bool = True) -> dict[str, Any]:
    return {"name": name, "is_up": is_up, "mac": mac, "addresses": list(addresses)}


def healthy() -> Seen:
    seen = of_each(3, {})
    for number, name in enumerate(NODES, 1):
        lo = link("127.0.0.1", "::1", name="lo", mac="00:00:00:00:00:00")
        names = {
            "hostname": name,
            "resolved": {f"node{n}": [f"10.0.0.{n}"] for n in (1, 2, 3)},
            "hosts": [LOCAL, "# mpitrain: 127.0.1.1 node1", *BLOCK],
            "set_up": True,
            "cloud_init": "",
            "links": [lo, link(f"10.0.0.{number}", mac=f"02:00:00:00:00:0{number}")],
            "machine_id": f"{number:032x}",
            "host_keys": [f"{KEY}{number}"],
        }
        seen.nodes[name] = {"resources": {"container": ""}, "names": names}
    return seen


def changed(node: str, **fields: Any) -> Seen:
    seen = healthy()
    seen.nodes[node]["names"].update(fields)
    return seen


def resolved(node: str, **addresses: Any) -> Seen:
    seen = healthy()
    seen.nodes[node]["names"]["resolved"].update(addresses)
    return seen


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("NAM")])
def test_a_healthy_cluster_and_one_without_answers(name: str) -> None:
    sound(name, healthy())
    silent = healthy()
    for sections in silent.nodes.values():
        sections["names"] = {"error": "no answer within 8 s"}
    assert verdicts(name, silent) == {"unknown"}


SET = "ansible-playbook cluster/setup.yml --tags hosts --limit {limit} -e mpitrain_set_hostname=true"
ELSEWHERE = changed("node1", hosts=[LOCAL, "10.9.9.9 gone node2 # old", *BLOCK])
ELSEWHERE.nodes["node1"]["names"]["resolved"]["node2"] = ["10.9.9.9"]
COMMENTED = "ssh 10.0.0.1 \"sudo sed -i '2s/^/# /' /etc/hosts\"  # the line: 10.9.9.9 gone node2 # old"
UNKNOWN = changed("node3", hostname="other")
UNKNOWN.nodes["node3"]["names"]["resolved"]["other"] = []


@pytest.mark.parametrize(
    ("id_", "seen", "verdict", "where", "found", "remedy"),
    [
        ("NAM01", changed("node2", hostname="worker"), "fail", "node2", "it calls itself worker", SET),
        ("NAM02", resolved("node3", node3=["127.0.1.1"]), "fail", "node3", "leads to 127.0.1.1", "--tags hosts"),
        ("NAM02", resolved("node3", node3=["::1", "10.0.0.3"]), "fail", "node3", "leads to ::1", "--tags hosts"),
        ("NAM02", resolved("node3", node3=None), "unknown", "node3", "", ""),
        ("NAM02", resolved("node3", node3=[]), "fail", "node3", "its own name is not known", "--tags hosts"),
        ("NAM02", UNKNOWN, "fail", "node3", "the name that it calls itself is not known", "mpitrain_set_hostname=true"),
        ("NAM03", ELSEWHERE, "fail", "node1", "the name node2 leads to 10.9.9.9", COMMENTED),
        ("NAM03", resolved("node1", node2=["10.9.9.9"]), "fail", "node1", "leads to 10.9.9.9", "nsswitch.conf"),
        ("NAM03", resolved("node1", node2=[]), "fail", "node1", "the name node2 is not known", "--tags hosts"),
        ("NAM03", resolved("node1", node2=None), "fail", "node1", "did not end", "resolv.conf"),
        ("NAM03", resolved("node1", node2=["10.0.0.2", "fd00::2"]), "warn", "node1", "10.0.0.2, fd00::2", ""),
        ("NAM04", changed("node1", hosts=[LOCAL], set_up=False), "skip", "node1", "did not write", ""),
        ("NAM05", changed("node1", cloud_init=None), "skip", "node1", "no cloud-init", ""),
        ("NAM05", changed("node1", cloud_init="localhost"), "warn", "node1", "_hosts: localhost", "--tags hosts"),
        ("NAM06", changed("node2", links=[link("10.0.0.2", is_up=False)]), "fail", "node2", "is down", "set eth0 up"),
        ("NAM06", changed("node2", links=[]), "unknown", "node2", "gives no interfaces", ""),
        ("NAM06", changed("node2", links=[link("1.2.3.4", "fe80::1")]), "fail", "node2", "have 1.2.3.4", "ip address"),
    ],
)
def test_names(id_: str, seen: Seen, verdict: str, where: str, found: str, remedy: str) -> None:
    only(id_, seen, verdict, where, found, remedy)


def test_names_that_do_no_harm() -> None:
    sound("NAM01", changed("node2", hostname="node2.example.org"))
    sound("NAM03", resolved("node3", node3=["127.0.1.1", "10.0.0.3"]))
    sound("NAM05", changed("node1", cloud_init="False"))


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ([LOCAL], "/etc/hosts lacks the lines of set-up"),
        (BLOCK[:-1], "/etc/hosts lacks the lines of set-up"),
        ([*BLOCK[:2], "10.9.9.9 node2", *BLOCK[3:]], "have '10.9.9.9 node2' for node2"),
        ([*BLOCK[:2], *BLOCK[3:]], "have nothing for node2"),
        ([*BLOCK[:3], "10.9.9.9 node2", *BLOCK[3:]], "'10.0.0.2 node2' and '10.9.9.9 node2' for node2"),
    ],
)
def test_the_block_of_set_up(hosts: list[str], found: str) -> None:
    only("NAM04", changed("node1", hosts=hosts), "fail", "node1", found, "--tags hosts --limit")


@pytest.mark.parametrize(
    ("field", "value", "verdict", "what", "remedy"),
    [
        ("machine_id", f"{1:032x}", "warn", "machine-id", "ssh 10.0.0.3 'sudo rm "),
        ("host_keys", [f"{KEY}1"], "fail", "ssh host key", "ssh 10.0.0.3 'sudo rm "),
        ("links", [link("10.0.0.3", mac="02:00:00:00:00:01")], "fail", "MAC", ""),
    ],
)
def test_a_copy(field: str, value: Any, verdict: str, what: str, remedy: str) -> None:
    """An identity is removed on all nodes but one."""
    one, other = judged("NAM07", changed("node3", **{field: value}))
    assert [(one.verdict, one.where), (other.verdict, other.where)] == [(verdict, ("node1",)), (verdict, ("node3",))]
    assert one.observed == other.observed and f"the same {what}" in one.observed
    assert one.remedy.startswith(remedy) and (other.remedy == one.remedy or not remedy)  # so both are one finding


def test_bridges_in_the_nodes_may_share_their_address() -> None:
    seen = healthy()
    for name in NODES:
        seen.nodes[name]["names"]["links"].append(link("172.17.0.1", name="docker0", mac="02:42:00:00:00:01"))
    sound("NAM07", seen)


def test_a_container_with_a_network_of_its_own() -> None:
    assert verdicts("CON02", healthy()) == {"skip"}
    seen = healthy()
    seen.nodes["node2"]["resources"]["container"] = "docker"
    assert [one.where for one in judged("CON02", seen)] == [("node1",), ("node3",)]
    seen.nodes["node2"]["names"]["links"][1]["addresses"] = ["172.17.0.2"]
    (failed,) = (one for one in judged("CON02", seen) if one.verdict == "fail")
    assert "it has 172.17.0.2, not 10.0.0.2" in failed.observed
    assert "--network host" in failed.remedy
    seen.nodes["node2"]["names"]["links"] = []
    (one,) = (one for one in judged("CON02", seen) if one.where == ("node2",))
    assert (one.verdict, one.observed) == ("unknown", "`ip -j address` gives no interfaces")


def test_a_node_that_was_named_by_its_address() -> None:
    seen = changed("node3", hostname="box")
    seen.target = replace(seen.target, hosts=(*seen.target.hosts[:2], Host("10.0.0.3", "10.0.0.3")))
    seen.nodes["10.0.0.3"] = seen.nodes.pop("node3")
    seen.nodes["10.0.0.3"]["names"]["resolved"]["10.0.0.3"] = ["10.0.0.3"]
    (one,) = (one for one in judged("NAM01", seen) if one.where == ("10.0.0.3",))
    assert (one.verdict, one.observed) == ("skip", "it was named by its address")
