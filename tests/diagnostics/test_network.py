"""The judges of the network."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diagnostics.made_up import seen
from mpitrain.diagnostics.check import Result, Seen
from mpitrain.diagnostics.checks import CHECKS, PAIRS
from mpitrain.diagnostics.collect import Cluster
from mpitrain.diagnostics.judge import judge
from mpitrain.diagnostics.node import interfaces, ways
from mpitrain.launch.variables import only_loopback

PAIR = ("node1", "node2")
REACH = {
    "connect": "ok",
    "found": "",
    "round_trips_seconds": [2e-4],
    "large_is_complete": True,
    "ping": {"large": True, "small": True},
    "mtu_bytes": 1500,
}


def interface(*addresses: str, **fields: Any) -> dict[str, Any]:
    found = {"is_up": True, "is_running": True, "mtu_bytes": 1500, "speed_mbit": 1000, "duplex": "full"}
    return {**found, "addresses": list(addresses), **fields}


def healthy(num_nodes: int = 4, **fields: Any) -> Seen:
    looked = seen(num_nodes, **fields)
    for name, address in looked.target.addresses.items():
        routes = {
            other: {"interface": "eth0", "source": address, "gateway": "", "network": "10.0.0.0/24"}
            for other in looked.target.names
            if other != name
        }
        looked.nodes[name] = {
            "network": {
                "interfaces": {"lo": interface("127.0.0.1/8"), "eth0": interface(f"{address}/24")},
                "routes": routes,
                "rdma": [],
                "firewall": "",
            },
            "counters": {"eth0": {"rx_errors": 0}},
            "ports": {"22": "sshd (pid 1)"},
            "variables": {},
        }
        for other in routes:
            looked.pairs[(name, other)] = {"reach": dict(REACH), "login between": {"failed": "", "seconds": 0.1}}
    return looked


def judged(id_: str, looked: Seen) -> list[Result]:
    return [one for one in judge([CHECKS[id_]], looked) if one.verdict != "pass"]


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
    routes["node3"] = {}
    assert judged("NET01", looked)[0].observed == "there is no route to node3"
    routes["node3"] = {"interface": "eth1"}
    (result,) = judged("NET01", looked)
    assert result.verdict == "warn" and "2 interfaces: eth0, eth1" in result.observed


def test_a_vpn_that_has_the_addresses_of_the_inventory_is_the_network() -> None:
    looked = healthy(3)
    for name, address in looked.target.addresses.items():
        network = looked.nodes[name]["network"]
        network["interfaces"]["wg0"] = {**network["interfaces"].pop("eth0"), "addresses": [f"{address}/24"]}
        for route in network["routes"].values():
            route["interface"] = "wg0"
    assert judged("NET01", looked) == []
    # A node of another address is behind the tunnel by chance.
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
    monkeypatch.setattr(interfaces, "_ip_json", lambda *_words: [link])
    monkeypatch.setattr(interfaces, "_firewall", lambda: "")
    assert interfaces.network({"peers": {}})["interfaces"]["eth0"]["temporary"] == ["2001:db8::ab"]


def test_a_gateway_on_the_same_network() -> None:
    looked = healthy()
    looked.nodes["node2"]["network"]["routes"]["node3"]["gateway"] = "10.0.0.254"
    (result,) = judged("NET01", looked)
    assert result.verdict == "warn" and "the gateway 10.0.0.254" in result.observed
    # Clouds give each machine a network of its own, and all goes by the gateway.
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


def test_drop_and_reject() -> None:
    looked = healthy()
    reach = looked.pairs[PAIR]["reach"]
    reach.update(connect="timeout", found="no answer within 3 s", beside=["ok", "refused"])
    (result,) = judged("NET04", looked)
    assert (result.verdict, result.where, result.mend) == ("fail", PAIR, ("node2",))
    assert "DROP" in result.observed and "no firewall is seen there" in result.observed
    assert result.remedy.startswith("ssh 10.0.0.2 sudo nft list ruleset")
    reach.update(connect="refused", found="Connection refused")
    looked.nodes["node2"]["network"]["firewall"] = "ufw"
    (result,) = judged("NET04", looked)
    assert "REJECT" in result.observed and "ufw is active there" in result.observed
    assert result.remedy == "ansible-playbook cluster/setup.yml --tags firewall --limit {limit}"


@pytest.mark.parametrize("connect", ["timeout", "refused", "unreachable"])
def test_a_way_that_is_too_slow_is_not_closed(connect: str) -> None:
    """ssh's port gave no answer in one of the turns, so nothing is known of the high ones."""
    looked = healthy()
    looked.pairs[PAIR]["reach"].update(connect=connect, found="no answer within 3 s", beside=["ok", "timeout"])
    (result,) = judged("NET04", looked)
    assert (result.verdict, result.where) == ("unknown", PAIR)
    assert result.observed == (
        "a high port gave no connection (no answer within 3 s), and ssh's port, in turns with it: ok, timeout"
    )


@pytest.mark.parametrize(
    ("tries", "beside"),
    [
        (["ok"], []),
        (["timeout", "ok"], ["ok"]),
        (["lost", "refused", "ok"], ["ok", "ok"]),
        (["timeout", "timeout", "timeout"], ["ok", "ok"]),
        (["timeout", "timeout", "refused"], ["ok", "ok"]),
    ],
)
def test_what_seems_closed_is_tried_again(tries: list[str], beside: list[str]) -> None:
    """In turns with ssh's port. A listener is made anew where the old one may be gone."""
    looked = healthy()
    calls: list[tuple[str, str]] = []

    def ask(name: str, call: str, wish: dict[str, Any], **_: Any) -> Any:
        calls.append((name, call))
        if call == "reach":
            return {**REACH, "connect": tries[sum(call == "reach" for _, call in calls) - 1]}
        assert call != "answer" or wish["port"] == 22
        return {"listen": 40000, "answer": "ok", "ping": REACH["ping"]}[call]

    cluster = cast("Cluster", SimpleNamespace(target=looked.target, seen=looked, ask=ask))
    reached = PAIRS["reach"](cluster, *PAIR)
    assert (reached["connect"], reached["beside"]) == (tries[-1], beside)
    listens = 1 + sum(one in ("lost", "refused") for one in tries[:-1])
    expected = ["listen"] * listens + ["reach"] * len(tries) + ["answer"] * len(beside) + ["ping"]
    assert sorted(call for _, call in calls) == sorted(expected)
    assert [call for _, call in calls if call in ("reach", "answer")] == [
        call for number in range(len(tries)) for call in ("answer", "reach") if number or call == "reach"
    ]


def test_what_a_port_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wish = {"address": "127.0.0.1", "port": server.getsockname()[1]}
        assert ways.answer(wish) == "ok"
    assert ways.answer(wish) == "refused"


def test_nothing_gets_there() -> None:
    looked = healthy()
    looked.pairs[PAIR]["reach"].update(connect="timeout", found="no answer within 3 s")
    assert judged("NET09", looked) == []
    looked.pairs[PAIR]["login between"] = {"failed": "timeout", "seconds": 5.0}
    (result,) = judged("NET09", looked)
    assert (result.verdict, result.where) == ("fail", PAIR) and "pings get through" in result.observed
    looked.pairs[PAIR]["reach"]["ping"] = {"large": False, "small": False}
    assert "pings do not get through either" in judged("NET09", looked)[0].observed


def test_packet_sizes() -> None:
    looked = healthy()
    reach = looked.pairs[PAIR]["reach"]
    reach.update(ping={"large": False, "small": True}, mtu_bytes=9000, large_is_complete=False)
    (result,) = judged("NET03", looked)
    assert (result.verdict, result.where) == ("fail", PAIR)
    assert "9000 bytes" in result.observed and "TCP stalls" in result.observed
    assert result.remedy.startswith(
        "ssh 10.0.0.1 'sudo ip link set eth0 mtu 1500'; ssh 10.0.0.2 'sudo ip link set eth0 mtu 1500'  #"
    )
    reach["large_is_complete"] = True
    assert judged("NET03", looked)[0].verdict == "warn"
    # No ping gets there at all: it says nothing about sizes.
    reach["ping"] = {"large": False, "small": False}
    assert judged("NET03", looked) == []
    reach.update(ping={"large": None, "small": None}, large_is_complete=False)
    assert judged("NET03", looked)[0].verdict == "skip"


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


def test_round_trips() -> None:
    looked = healthy()
    reach = looked.pairs[PAIR]["reach"]
    reach["round_trips_seconds"] = [0.5, 7e-3]  # the best counts
    (result,) = judged("NET06", looked)
    assert (
        result.verdict == "warn"
        and "over 5 ms" in result.observed
        and "most others" in result.allowed
        and result.remedy
    )
    for sections in looked.pairs.values():  # all alike: a slower network, and no fault
        sections["reach"]["round_trips_seconds"] = [7e-3]
    assert judged("NET06", looked) == []
    lost = {**REACH, "connect": "lost", "found": "timed out", "round_trips_seconds": [], "beside": ["ok", "ok"]}
    looked.pairs[PAIR]["reach"] = lost
    assert judged("NET06", looked)[0].verdict == "fail"
    assert judged("NET04", looked) == []
    looked.pairs[PAIR]["reach"] = {**lost, "beside": ["timeout", "ok"]}
    assert judged("NET06", looked)[0].verdict == "unknown"


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
    assert judged("NET01", looked) == []  # behind a translation, which CON02 and set-up look at


def test_taken_ports() -> None:
    looked = healthy(environ={"MPIEXEC_PORT_RANGE": "50200:50201", "FI_TCP_PORT_LOW_RANGE": "7"})
    ports = looked.nodes["node3"]["ports"]
    ports["50200"] = "python3 (pid 5)"
    assert judged("NET08", looked) == []  # one is left
    ports["50201"] = ""
    (result,) = judged("NET08", looked)
    assert (result.verdict, result.where) == ("fail", ("node3",))
    assert result.observed == "all ports of MPIEXEC_PORT_RANGE (50200 to 50201) are in use, by python3"
    assert {one.verdict for one in judged("NET08", healthy())} == {"skip"}


def test_devices_of_a_node_whose_interfaces_are_not_known() -> None:
    looked = healthy(environ={"UCX_NET_DEVICES": "eth9"})
    looked.nodes["node2"]["network"]["interfaces"] = {}
    assert {one.where: one.verdict for one in judged("NET07", looked)}[("node2",)] == "unknown"


def test_a_pair_of_a_node_without_ip() -> None:
    looked = healthy()
    looked.nodes["node1"]["network"] = {"error": "there is no program ip"}
    cluster = cast("Cluster", SimpleNamespace(target=looked.target, seen=looked))
    assert PAIRS["reach"](cluster, *PAIR) == {"error": "there is no program ip"}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_connection_of_either_family(address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            pytest.skip(f"this machine has no {address}")
    port = ways.listen({"address": address, "seconds": 5.0})
    found = ways.reach({"address": address, "port": port})
    assert (found["connect"], found["large_is_complete"]) == ("ok", True)


@pytest.mark.parametrize(("address", "payload_bytes"), [("10.0.0.2", 1472), ("fd00::2", 1452)])
def test_a_ping_of_full_size(address: str, payload_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(ways, "_ping", lambda _address, size, _count: sizes.append(size) or True)
    assert ways.ping({"address": address, "mtu_bytes": 1500}) == {"large": True, "small": True}
    assert sizes == [payload_bytes]


@pytest.mark.parametrize(
    ("sent", "came", "verdict", "words"),
    [
        (64, 64, None, ""),
        (128, 127, None, ""),  # below 1 %
        (128, 126, "warn", "1 % or more of the packets are lost"),
        (128, 121, "fail", "5 % or more of the packets are lost"),
        (128, 102, "fail", "20 % or more of the packets are lost"),
        (64, 0, "skip", "no UDP gets through"),
    ],
)
def test_packets_that_get_lost(sent: int, came: int, verdict: str | None, words: str) -> None:
    looked = healthy(2)
    looked.pairs[PAIR]["loss"] = {"sent": sent, "came": came}
    looked.pairs["node2", "node1"]["loss"] = {"sent": 64, "came": 64}
    there, back = judge([CHECKS["NET11"]], looked)
    assert (there.where, back.where, back.verdict) == (PAIR, PAIR[::-1], "pass")
    assert there.verdict == (verdict or "pass")
    assert words in there.observed
    if verdict in ("warn", "fail"):
        line = "'ip -statistics link; sudo nft list ruleset; tc -s qdisc'"
        assert there.remedy == f"ssh 10.0.0.1 {line}; ssh 10.0.0.2 {line}  # then try another cable and port"


def test_datagrams_are_counted_where_they_come() -> None:
    """All of them, through the node's own calls; where some got lost, those of a second try alone count."""
    lost_at_first = [30, 0, 0]

    def ask(_name: str, call: str, wish: dict[str, Any], **_: Any) -> Any:
        answer = ways.CALLS[call](wish)
        return answer - lost_at_first.pop(0) if call == "count_datagrams" else answer

    cluster = cast(
        Cluster, SimpleNamespace(ask=ask, target=SimpleNamespace(addresses=dict.fromkeys(PAIR, "127.0.0.1")))
    )
    assert PAIRS["loss"](cluster, *PAIR) == {"sent": 128, "came": 128}
    lost_at_first[:] = [0]
    assert PAIRS["loss"](cluster, *PAIR) == {"sent": 64, "came": 64}
    lost_at_first[:] = [64]  # as where UDP is dropped: that is no loss
    assert PAIRS["loss"](cluster, *PAIR) == {"sent": 64, "came": 0}
