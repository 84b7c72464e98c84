"""Faults of the matrix: the network between the nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from faults.cluster.matrix import Fault
from testbed.bed import Bed

EVERY = ("node1", "node2", "node3", "node4")
_HIGH = "tcp flags & (syn | ack) == syn tcp dport 32768-65535"
_BRIDGE = "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up"


def in_network(bed: Bed, node: str, line: str) -> None:
    """Run a line of shell in the node's network, with the programs of this machine."""
    command = ["ip", "netns", "exec", bed.record.node_namespace(node), "sh", "-c", line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def _rules(node: str, rule: str) -> Callable[[Bed], None]:
    def do(bed: Bed) -> None:
        text = rule.format(**{name: bed.address(name) for name in bed.names})
        table = f"table inet fault {{ chain input {{ type filter hook input priority 0; {text}; }}; }}"
        in_network(bed, node, f"nft '{table}'")

    return do


def _no_rules(node: str) -> Callable[[Bed], None]:
    return lambda bed: in_network(bed, node, "nft delete table inet fault")


def _mtu(bytes_: int, *nodes: str) -> Callable[[Bed], None]:
    def do(bed: Bed) -> None:
        for node in nodes:
            bed.mtu(node, bytes_)

    return do


def healed(*nodes: str) -> Callable[[Bed], None]:
    """Return a function that undoes all faults of the network on these nodes."""

    def do(bed: Bed) -> None:
        for node in nodes:
            bed.heal(node)

    return do


FAULTS: dict[str, Fault] = {
    "a bridge docker0 with the same address on all nodes, up": Fault(
        dict.fromkeys(EVERY, _BRIDGE),
        dict.fromkeys(EVERY, "ip link del docker0"),
        {"NET02": ("warn", "node[1-4]")},
        shows=["172.17.0.1", "--write-env"],
    ),
    "node2's route to node3 leaves by docker0": Fault(
        lambda bed: in_network(
            bed,
            "node2",
            f"{_BRIDGE} && ip route add {bed.address('node3')} dev docker0",
        ),
        {"node2": "ip link del docker0"},
        {"NET01": ("fail", "node2")},
        level="full",
        shows=["docker0"],
    ),
    "node3 has the address of node2 too, on an interface that answers nobody": Fault(
        lambda bed: in_network(
            bed,
            "node3",
            f"echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore; ip addr add {bed.address('node2')}/32 dev lo",
        ),
        {},
        {"NET01": ("fail", "node3")},
        has_line=True,
        shows=["which is node2's: two machines have one address"],
    ),
    "UCX_NET_DEVICES names an interface that no node has": Fault(
        {},
        {},
        {"NET07": ("fail", "node[1-4]")},
        shows=["UCX_NET_DEVICES names eth7"],
        env={"UCX_NET_DEVICES": "eth7"},
    ),
    "a program listens on node3 on the only port that MPIEXEC_PORT_RANGE allows": Fault(
        {
            "node3": "systemd-run --unit fault-port python3 -m http.server 50200 && "
            "for i in $(seq 600); do (exec 3<>/dev/tcp/127.0.0.1/50200) && exit 0; sleep 0.1; done; exit 1"
        },
        {"node3": "systemctl stop fault-port"},
        {"NET08": ("fail", "node3")},
        shows=["python3", "50200"],
        env={"MPIEXEC_PORT_RANGE": "50200:50200"},
    ),
    "new connections to high ports of node3 dropped": Fault(
        _rules("node3", f"{_HIGH} drop"),
        _no_rules("node3"),
        {"NET04": ("fail", "every other -> node3")},
        level="full",
        shows=["DROP"],
    ),
    "new connections to high ports of node2 rejected": Fault(
        _rules("node2", f"{_HIGH} reject"),
        _no_rules("node2"),
        {"NET04": ("fail", "every other -> node2")},
        level="full",
        shows=["REJECT"],
    ),
    "new connections from node2 dropped on node3": Fault(
        _rules("node3", "ip saddr {node2} tcp flags & (syn | ack) == syn drop"),
        _no_rules("node3"),
        {"NET09": ("fail", "node2 -> node3")},
        level="full",
        shows=["pings get through"],
    ),
    "all that comes from node2 dropped on node3, its answers too": Fault(
        _rules("node3", "ip saddr {node2} drop"),
        _no_rules("node3"),
        {"NET09": ("fail", "node2 <-> node3")},
        level="full",
        shows=["pings do not get through"],
    ),
    "20 % of what node2 sends to node3 lost": Fault(
        _rules("node3", "ip saddr {node2} numgen random mod 100 < 20 drop"),
        _no_rules("node3"),
        {"NET11": ("fail", "node2 -> node3")},
        level="full",
        shows=["of the packets are lost on this way"],
    ),
    "20 % of what node2 sends to node3 by TCP lost": Fault(
        _rules("node3", "ip saddr {node2} meta l4proto tcp numgen random mod 100 < 20 drop"),
        _no_rules("node3"),
        {"NET11": ("fail", "node2 -> node3")},
        level="full",
        shows=["of its packets again on this way"],
    ),
    "20 % of what node2 sends to node3 dropped by node2's own filter": Fault(
        lambda bed: in_network(
            bed,
            "node2",
            "nft 'table inet fault { chain output { type filter hook output priority 0; "
            f"ip daddr {bed.address('node3')} numgen random mod 100 < 20 drop; }}; }}'",
        ),
        _no_rules("node2"),
        {"NET11": ("fail", "node2 -> node3")},
        level="full",
        shows=["of the packets are lost on this way"],
    ),
    "MTU 9000 on node2 and node3, 1500 on the network": Fault(
        _mtu(9000, "node2", "node3"),
        healed("node2", "node3"),
        {"NET03": ("fail", "node2 <-> node3")},
        level="full",
        shows=["9000", "stalls"],
    ),
    "MTU 9000 on node4, 1500 on the network": Fault(
        _mtu(9000, "node4"),
        healed("node4"),
        {"NET03": ("warn", "node4 -> every other")},
        level="full",
        shows=["TCP agrees on smaller ones"],
    ),
}
