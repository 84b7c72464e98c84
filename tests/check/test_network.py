"""The judges of the network, and the variables that --write-env makes of it."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from check.made_up import judged, only, seen, sound, verdicts
from mpitrain.check.check import Seen
from mpitrain.check.checks import PAIRS
from mpitrain.check.collect import Cluster
from mpitrain.check.node import network
from mpitrain.check.run import write_variables
from mpitrain.errors import ClusterError
from mpitrain.launch.variables import only_loopback, read_env_file

PAIR = ("node1", "node2")
REACH = {"connect": "ok", "found": "", "round_trips_seconds": [2e-4], "large_is_complete": True, "mtu_bytes": 1500}
REACH |= {"ping": {"large": True, "small": True}}


def interface(*addresses: str, **fields: Any) -> dict[str, Any]:
    found = {"is_up": True, "is_running": True, "mtu_bytes": 1500, "speed_mbit": 1000, "duplex": "full"}
    return {**found, "addresses": list(addresses), **fields}


def healthy(num_nodes: int = 4, **fields: Any) -> Seen:
    looked = seen(num_nodes, **fields)
    for name, address in looked.target.addresses.items():
        others = [other for other in looked.target.names if other != name]
        route = {"interface": "eth0", "source": address, "gateway": "", "network": "10.0.0.0/24"}
        interfaces = {"lo": interface("127.0.0.1/8"), "eth0": interface(f"{address}/24")}
        looked.nodes[name] = {
            "network": {
                "interfaces": interfaces,
                "routes": {other: dict(route) for other in others},
                "rdma": [],
                "firewall": "",
            },
            "counters": {"eth0": {"rx_errors": 0}},
            "ports": {"22": "sshd (pid 1)"},
            "variables": {},
        }
        for other in others:
            looked.pairs[name, other] = {"reach": dict(REACH), "login between": {"failed": "", "seconds": 0.1}}
    return looked


def of(looked: Seen, node: str = "node2") -> tuple[dict[str, Any], dict[str, Any]]:
    """The interfaces and the routes of a node, to change."""
    return looked.nodes[node]["network"]["interfaces"], looked.nodes[node]["network"]["routes"]


def test_a_healthy_network_and_one_of_which_nothing_was_seen() -> None:
    looked = healthy(environ={"FI_TCP_IFACE": "eth0", "MPIEXEC_PORT_RANGE": "50200:50300"})
    for number in range(1, 10):
        sound(f"NET0{number}", healthy() if number == 2 else looked)  # of a cluster, NET02 is about all interfaces
    for number in (1, 2, 3, 4, 5, 6, 9):
        assert verdicts(f"NET0{number}", seen(2)) == {"unknown"}


def test_routes() -> None:
    looked = healthy()
    _, routes = of(looked)
    wrong = "the route to node3 leaves through wg0"
    for route, verdict, observed, remedy in (
        ({"interface": "wg0"}, "fail", wrong, "ip route get 10.0.0.3"),
        ({"interface": "wg0", "source": "10.8.0.2"}, "fail", wrong, ""),  # an address that goes with the interface
        ({}, "fail", "there is no route to node3", ""),
        ({"interface": "eth1"}, "warn", "2 interfaces: eth0, eth1", ""),
    ):
        routes["node3"] = route
        only("NET01", looked, verdict, "node2", observed, remedy)


def test_two_machines_have_one_address() -> None:
    looked = healthy()
    interfaces, routes = of(looked)
    interfaces["eth0"]["addresses"].append("10.0.0.3/24")
    routes["node3"] = {"interface": "lo", "source": "10.0.0.2"}
    observed = "it has the address 10.0.0.3 too, which is node3's: two machines have one address"
    one = only("NET01", looked, "fail", "node2", observed, "sudo ip address del 10.0.0.3/24 dev eth0")
    assert one.remedy.startswith("ssh ")


def test_a_vpn_that_has_the_addresses_of_the_inventory_is_the_network() -> None:
    looked = healthy(3)
    for name, address in looked.target.addresses.items():
        interfaces, routes = of(looked, name)
        interfaces["wg0"] = {**interfaces.pop("eth0"), "addresses": [f"{address}/24"]}
        for route in routes.values():
            route["interface"] = "wg0"
    sound("NET01", looked)
    # A node with another address is behind the tunnel by chance.
    of(looked)[0]["wg0"]["addresses"] = ["10.8.0.2/24"]
    only("NET01", looked, "fail", "node2", "the route to node[1,3] leaves through wg0")


def test_temporary_addresses_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own, temporary = ({"local": f"2001:db8::{end}", "prefixlen": 64} for end in ("1", "ab"))
    link = {"ifname": "eth0", "flags": ["UP"], "mtu": 1500, "addr_info": [own, {**temporary, "temporary": True}]}
    monkeypatch.setattr(network, "_ip_json", lambda *_words: [link])
    monkeypatch.setattr(network, "_firewall", lambda: "")
    assert network.network({"peers": {}})["interfaces"]["eth0"]["temporary"] == ["2001:db8::ab"]


def test_a_gateway_on_the_same_network() -> None:
    looked = healthy()
    interfaces, routes = of(looked)
    routes["node3"]["gateway"] = "10.0.0.254"
    only("NET01", looked, "warn", "node2", "the gateway 10.0.0.254")
    # Clouds give each machine a network of its own. All traffic goes through the gateway.
    interfaces["eth0"]["addresses"] = ["10.0.0.2/32"]
    sound("NET01", looked)


def test_the_same_address_on_two_nodes() -> None:
    looked = healthy()
    for name in ("node1", "node3"):
        of(looked, name)[0]["docker0"] = interface("172.17.0.1/16", is_running=False)
    results = judged("NET02", looked)
    assert [(one.verdict, one.where) for one in results] == [("warn", ("node1",)), ("warn", ("node3",))]
    assert "docker0 has the address 172.17.0.1, without a carrier" in results[0].observed
    assert "--write-env" in results[0].remedy
    of(looked, "node3")[0]["docker0"] = interface("172.18.0.1/16")
    sound("NET02", looked)
    # Who names the interface has no trouble with others.
    assert verdicts("NET02", healthy(environ={"UCX_NET_DEVICES": "eth0"})) == {"skip"}


def test_links() -> None:
    looked = healthy()
    eth0 = of(looked, "node4")[0]["eth0"]
    eth0["speed_mbit"] = 100
    only("NET05", looked, "fail", "node4", "eth0 runs at 100 Mbit/s", allowed="1000 Mbit/s")
    eth0.update(speed_mbit=None, duplex="half")
    looked.nodes["node4"]["counters"]["eth0"]["rx_errors"] = 3
    half, errors = judged("NET05", looked)
    assert (half.verdict, errors.verdict) == ("warn", "warn")
    assert "half duplex" in half.observed and "rx_errors" in errors.observed and "ethtool eth0" in errors.remedy


def test_devices_of_variables() -> None:
    looked = healthy(environ={"UCX_NET_DEVICES": "mlx5_0:1", "OMPI_MCA_btl_tcp_if_include": "10.0.0.0/24"})
    for name in ("node1", "node2", "node3"):
        looked.nodes[name]["network"]["rdma"] = ["mlx5_0"]
    observed = "your environment: UCX_NET_DEVICES names mlx5_0, which does not exist"
    only("NET07", looked, "fail", "node4", observed, "unset UCX_NET_DEVICES", "one of eth0")
    looked = healthy()
    assert verdicts("NET07", looked) == {"skip"}
    looked.nodes["node2"]["variables"] = {"FI_TCP_IFACE": "eno1"}
    (result,) = (one for one in judged("NET07", looked) if one.verdict == "fail")
    assert "cluster's environment there: FI_TCP_IFACE names eno1" in result.observed
    assert "FI_TCP_IFACE=/d" in result.remedy
    unseen = healthy(environ={"UCX_NET_DEVICES": "eth9"})
    unseen.nodes["node2"]["network"]["interfaces"] = {}
    assert {one.where: one.verdict for one in judged("NET07", unseen)}[("node2",)] == "unknown"


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
    interfaces, routes = of(looked)
    routes["node1"]["source"] = "10.0.0.99"
    only("NET01", looked, "warn", "node2", "")
    looked.nodes["node2"]["names"] = {"set_up": True}
    observed = "it reaches node1 from 10.0.0.99, which is not its address in the inventory"
    only("NET01", looked, "fail", "node2", observed, "ssh 10.0.0.2 ip route get 10.0.0.1")
    interfaces["eth0"]["addresses"] = ["10.0.0.99/24", "10.0.0.2/24"]
    (result,) = judged("NET01", looked)
    line, _, comment = result.remedy.partition("  # ")
    steps = [
        "sudo sysctl -qw net.ipv4.conf.eth0.promote_secondaries=1",
        "sudo ip address del 10.0.0.99/24 dev eth0",
        "sudo ip address add 10.0.0.99/24 dev eth0",
    ]
    assert shlex.split(line) == ["ssh", "10.0.0.2", " && ".join(steps)]
    assert comment == "until the node restarts; its settings must name 10.0.0.2 first"
    interfaces["eth0"]["addresses"] = ["192.168.1.5/24"]
    sound("NET01", looked)  # behind address translation, which CON02 and set-up check


def test_a_pair_of_a_node_without_ip() -> None:
    looked = healthy()
    looked.nodes["node1"]["network"] = {"error": "there is no program ip"}
    cluster = cast("Cluster", SimpleNamespace(target=looked.target, seen=looked))
    assert PAIRS["reach"](cluster, *PAIR) == {"error": "there is no program ip"}


# -- the file of --write-env, which `mpitrain run` and a shell can read ------------------------------------------------


def test_the_file_has_the_interface_for_every_library(tmp_path: Path) -> None:
    path = tmp_path / "mpi.env"
    write_variables(path, healthy())
    found = read_env_file(path)
    assert found["UCX_NET_DEVICES"] == found["FI_TCP_IFACE"] == found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert found["HYDRA_IFACE"] == found["I_MPI_HYDRA_IFACE"] == "eth0"
    assert found["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert found["OMPI_MCA_btl_tcp_if_include"] == found["PRTE_MCA_prte_if_include"] == "10.0.0.0/24"
    line = ["sh", "-ec", f". {path}; echo $NCCL_SOCKET_IFNAME"]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "=eth0\n"
    # RDMA hardware is not hidden. Of names that differ, the networks are left.
    looked = healthy()
    looked.nodes["node2"]["network"]["rdma"] = ["mlx5_0"]
    write_variables(path, looked)
    assert "UCX_NET_DEVICES" not in read_env_file(path)
    looked = healthy()
    for route in of(looked)[1].values():
        route["interface"] = "eno1"
    write_variables(path, looked)
    assert set(read_env_file(path).values()) == {"10.0.0.0/24"}


def test_what_cannot_be_known_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "mpi.env"
    unseen, no_route = healthy(), healthy()
    del unseen.nodes["node3"]["network"]
    of(no_route, "node3")[1]["node1"] = {}
    for looked, file, says in (
        (unseen, path, "the network of node3 is not known"),
        (no_route, path, "node3 does not say by which interface"),
        (healthy(1), path, "one node"),
        (healthy(), tmp_path / "none/mpi.env", "cannot be written: No such file"),
    ):
        with pytest.raises(ClusterError, match=says):
            write_variables(file, looked)
    assert not path.exists()
