"""The judges of the network."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from check.made_up import seen
from check.made_up_network import PAIR, healthy, interface, judged
from mpitrain.check.checks import PAIRS
from mpitrain.check.collect import Cluster
from mpitrain.check.node import network
from mpitrain.launch.variables import only_loopback


def test_a_healthy_network_passes() -> None:
    looked = healthy(environ={"FI_TCP_IFACE": "eth0", "MPIEXEC_PORT_RANGE": "50200:50300"})
    for id_ in ("NET01", "NET03", "NET04", "NET05", "NET06", "NET07", "NET08", "NET09"):
        assert judged(id_, looked) == []
    assert judged("NET02", healthy()) == []


def test_nothing_seen_is_unknown() -> None:
    for id_ in ("NET01", "NET02", "NET03", "NET04", "NET05", "NET06", "NET09"):
        assert {one.verdict for one in judged(id_, seen(2))} == {"unknown"}


def test_routes() -> None:
    looked = healthy()
    routes = looked.nodes["node2"]["network"]["routes"]
    routes["node3"] = {"interface": "wg0"}
    (result,) = judged("NET01", looked)
    assert (result.verdict, result.where) == ("fail", ("node2",))
    assert result.observed == "the route to node3 leaves through wg0" and "ip route get 10.0.0.3" in result.remedy
    routes["node3"] = {"interface": "wg0", "source": "10.8.0.2"}  # an address that goes with the interface
    assert [one.observed for one in judged("NET01", looked)] == ["the route to node3 leaves through wg0"]
    routes["node3"] = {}
    assert judged("NET01", looked)[0].observed == "there is no route to node3"
    routes["node3"] = {"interface": "eth1"}
    (result,) = judged("NET01", looked)
    assert result.verdict == "warn" and "2 interfaces: eth0, eth1" in result.observed


def test_two_machines_have_one_address() -> None:
    looked = healthy()
    network = looked.nodes["node2"]["network"]
    network["interfaces"]["eth0"]["addresses"].append("10.0.0.3/24")
    network["routes"]["node3"] = {"interface": "lo", "source": "10.0.0.2"}
    (result,) = judged("NET01", looked)
    assert (result.verdict, result.where) == ("fail", ("node2",))
    assert result.observed == "it has the address 10.0.0.3 too, which is node3's: two machines have one address"
    assert result.remedy.startswith("ssh ") and "sudo ip address del 10.0.0.3/24 dev eth0" in result.remedy


def test_a_vpn_that_has_the_addresses_of_the_inventory_is_the_network() -> None:
    looked = healthy(3)
    for name, address in looked.target.addresses.items():
        network = looked.nodes[name]["network"]
        network["interfaces"]["wg0"] = {**network["interfaces"].pop("eth0"), "addresses": [f"{address}/24"]}
        for route in network["routes"].values():
            route["interface"] = "wg0"
    assert judged("NET01", looked) == []
    # A node with another address is behind the tunnel by chance.
    looked.nodes["node2"]["network"]["interfaces"]["wg0"]["addresses"] = ["10.8.0.2/24"]
    (result,) = judged("NET01", looked)
    assert (result.verdict, result.where) == ("fail", ("node2",))
    assert result.observed == "the route to node[1,3] leaves through wg0"


def test_temporary_addresses_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [
        {"local": "2001:db8::1", "prefixlen": 64},
        {"local": "2001:db8::ab", "prefixlen": 64, "temporary": True},
    ]
    link = {"ifname": "eth0", "flags": ["UP"], "mtu": 1500, "addr_info": addresses}
    monkeypatch.setattr(network, "_ip_json", lambda *_words: [link])
    monkeypatch.setattr(network, "_firewall", lambda: "")
    assert network.network({"peers": {}})["interfaces"]["eth0"]["temporary"] == ["2001:db8::ab"]


def test_a_gateway_on_the_same_network() -> None:
    looked = healthy()
    looked.nodes["node2"]["network"]["routes"]["node3"]["gateway"] = "10.0.0.254"
    (result,) = judged("NET01", looked)
    assert result.verdict == "warn" and "the gateway 10.0.0.254" in result.observed
    # Clouds give each machine a network of its own. All traffic goes through the gateway.
    looked.nodes["node2"]["network"]["interfaces"]["eth0"]["addresses"] = ["10.0.0.2/32"]
    assert judged("NET01", looked) == []


def test_the_same_address_on_two_nodes() -> None:
    looked = healthy()
    for name in ("node1", "node3"):
        looked.nodes[name]["network"]["interfaces"]["docker0"] = interface("172.17.0.1/16", is_running=False)
    results = judged("NET02", looked)
    assert [(one.verdict, one.where) for one in results] == [("warn", ("node1",)), ("warn", ("node3",))]
    assert "docker0 has the address 172.17.0.1, without a carrier" in results[0].observed
    assert "--write-env" in results[0].remedy
    looked.nodes["node3"]["network"]["interfaces"]["docker0"] = interface("172.18.0.1/16")
    assert judged("NET02", looked) == []


def test_who_names_the_interface_has_no_trouble_with_others() -> None:
    looked = healthy(environ={"UCX_NET_DEVICES": "eth0"})
    assert [one.verdict for one in judged("NET02", looked)] == ["skip"]


def test_links() -> None:
    looked = healthy()
    eth0 = looked.nodes["node4"]["network"]["interfaces"]["eth0"]
    eth0["speed_mbit"] = 100
    (result,) = judged("NET05", looked)
    assert (result.verdict, result.where) == ("fail", ("node4",))
    assert result.observed == "eth0 runs at 100 Mbit/s" and result.allowed.startswith("1000 Mbit/s")
    eth0.update(speed_mbit=None, duplex="half")
    looked.nodes["node4"]["counters"]["eth0"]["rx_errors"] = 3
    half, errors = judged("NET05", looked)
    assert (half.verdict, errors.verdict) == ("warn", "warn")
    assert "half duplex" in half.observed and "rx_errors" in errors.observed and "ethtool eth0" in errors.remedy


def test_devices_of_variables() -> None:
    looked = healthy(environ={"UCX_NET_DEVICES": "mlx5_0:1", "OMPI_MCA_btl_tcp_if_include": "10.0.0.0/24"})
    for name in ("node1", "node2", "node3"):
        looked.nodes[name]["network"]["rdma"] = ["mlx5_0"]
    (result,) = judged("NET07", looked)
    assert (result.verdict, result.where) == ("fail", ("node4",))
    assert result.observed == "your environment: UCX_NET_DEVICES names mlx5_0, which does not exist"
    assert (result.allowed, result.remedy) == ("one of eth0", "unset UCX_NET_DEVICES")
    looked = healthy()
    assert {one.verdict for one in judged("NET07", looked)} == {"skip"}
    looked.nodes["node2"]["variables"] = {"FI_TCP_IFACE": "eno1"}
    result = next(one for one in judged("NET07", looked) if one.verdict == "fail")
    assert (
        "cluster's environment there: FI_TCP_IFACE names eno1" in result.observed and "FI_TCP_IFACE=/d" in result.remedy
    )


def test_a_variable_of_one_nodes_shell_that_names_the_loopback(tmp_path: Path) -> None:
    looked = healthy()
    looked.nodes["node3"]["shell"] = {"environment": {"PATH": "/bin", "UCX_NET_DEVICES": "lo"}}
    (result,) = [one for one in judged("NET07", looked) if one.verdict == "fail"]
    assert result.where == ("node3",)
    words = "cluster's environment there: UCX_NET_DEVICES names lo, which leads to no other node"
    assert (result.observed, result.allowed) == (words, "one of eth0")
    file = tmp_path / "environment"
    file.write_text("A=1\nexport UCX_NET_DEVICES=lo\nUCX_NET_DEVICES=lo\nB=UCX_NET_DEVICES\n")
    line = shlex.split(result.remedy)[2].replace("sudo ", "").replace("/etc/environment", str(file))
    line = re.sub("(~cluster|/etc/(profile|bash))\\S*", "/no/such", line)
    subprocess.run(line, shell=True, check=True)
    assert file.read_text() == "A=1\nB=UCX_NET_DEVICES\n"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"UCX_NET_DEVICES": "lo,eth0"}, []),
        ({"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"}, ["OMPI_MCA_btl_tcp_if_include names 127.0.0.0/8"]),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, ["NCCL_SOCKET_IFNAME names lo"]),
        ({"NCCL_SOCKET_IFNAME": "^lo"}, []),
    ],
)
def test_what_names_the_loopback_alone(environ: dict[str, str], says: list[str]) -> None:
    assert only_loopback(environ) == says


def test_a_node_that_reaches_the_others_from_another_address() -> None:
    looked = healthy(2)
    looked.nodes["node2"]["network"]["routes"]["node1"]["source"] = "10.0.0.99"
    (result,) = judged("NET01", looked)
    assert (result.verdict, result.where) == ("warn", ("node2",))
    looked.nodes["node2"]["names"] = {"set_up": True}
    (result,) = judged("NET01", looked)
    assert result.verdict == "fail"
    assert result.observed == "it reaches node1 from 10.0.0.99, which is not its address in the inventory"
    assert result.remedy == "ssh 10.0.0.2 ip route get 10.0.0.1"
    eth0 = looked.nodes["node2"]["network"]["interfaces"]["eth0"]
    eth0["addresses"] = ["10.0.0.99/24", "10.0.0.2/24"]
    (result,) = judged("NET01", looked)
    line, _, comment = result.remedy.partition("  # ")
    steps = [
        "sudo sysctl -qw net.ipv4.conf.eth0.promote_secondaries=1",
        "sudo ip address del 10.0.0.99/24 dev eth0",
        "sudo ip address add 10.0.0.99/24 dev eth0",
    ]
    assert shlex.split(line) == ["ssh", "10.0.0.2", " && ".join(steps)]
    assert comment == "until the node restarts; its settings must name 10.0.0.2 first"
    looked.nodes["node2"]["network"]["interfaces"]["eth0"]["addresses"] = ["192.168.1.5/24"]
    assert judged("NET01", looked) == []  # behind address translation, which CON02 and set-up check


def test_devices_of_a_node_whose_interfaces_are_not_known() -> None:
    looked = healthy(environ={"UCX_NET_DEVICES": "eth9"})
    looked.nodes["node2"]["network"]["interfaces"] = {}
    assert {one.where: one.verdict for one in judged("NET07", looked)}[("node2",)] == "unknown"


def test_a_pair_of_a_node_without_ip() -> None:
    looked = healthy()
    looked.nodes["node1"]["network"] = {"error": "there is no program ip"}
    cluster = cast("Cluster", SimpleNamespace(target=looked.target, seen=looked))
    assert PAIRS["reach"](cluster, *PAIR) == {"error": "there is no program ip"}
