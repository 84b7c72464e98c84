"""Faults of the matrix: a node, a link or the shared folder is slow."""

from __future__ import annotations

from collections.abc import Callable

from faults.cluster.faults_network import healed, in_network
from faults.cluster.matrix import Fault
from testbed.bed import Bed

# A limit on what eth0 sends to one address or port. All other traffic is as fast as before.
_LIMIT = (
    "tc qdisc add dev eth0 root handle 1: htb default 2 && "
    "tc class add dev eth0 parent 1: classid 1:2 htb rate 20gbit quantum 60000 && "
    "tc class add dev eth0 parent 1: classid 1:1 htb rate {rate} burst {burst} cburst {burst} && "
    "tc filter add dev eth0 parent 1: protocol ip u32 match ip {what} flowid 1:1"
)
_NO_LIMIT = "tc qdisc del dev eth0 root"
_AFFINITY = "/etc/systemd/system/ssh.service.d/fault.conf"
_ONE_PROCESSOR = (
    f"mkdir -p $(dirname {_AFFINITY}) && printf '[Service]\\nCPUAffinity=0\\n' >{_AFFINITY} && "
    "systemctl daemon-reload && systemctl restart ssh && for number in $(seq 30); do systemd-run --unit fault-$number "
    "-p CPUAffinity=0 sh -c 'while :; do :; done'; done"
)
_ALL_PROCESSORS = (
    f"systemctl stop 'fault-*'; rm -r $(dirname {_AFFINITY}); systemctl daemon-reload; systemctl restart ssh"
)


def limit(bed: Bed, node: str, what: str, rate: str, burst: str = "256kb") -> None:
    """Slow down what a node sends to an address or a port, given in the words of tc's u32."""
    where = what.format(**{name: bed.address(name) for name in bed.names})
    in_network(bed, node, _LIMIT.format(rate=rate, burst=burst, what=where))


def no_limit(bed: Bed, node: str) -> None:
    """Remove the limit."""
    in_network(bed, node, _NO_LIMIT)


def _limit(*words: str) -> Callable[[Bed], None]:
    return lambda bed: limit(bed, *words)


def _no_limit(node: str) -> Callable[[Bed], None]:
    return lambda bed: no_limit(bed, node)


FAULTS: dict[str, Fault] = {
    "what node2 sends to node3 limited to 10 Mbit/s": Fault(
        _limit("node2", "dst {node3}", "10mbit"),
        _no_limit("node2"),
        {"PRF01": ("fail", "node2 -> node3")},
        level="bench",
        options=["--only", "PRF01"],  # a job's allreduce is slow as well
        shows=["the link"],
    ),
    "node3's cable limited to 100 Mbit/s": Fault(
        lambda bed: bed.shape("node3", "100mbit"),
        healed("node3"),
        {"PRF01": ("fail", "node3")},
        level="bench",
        options=["--only", "PRF01"],
        shows=["the node: it sends and receives slowly"],
    ),
    "node4's logins on one processor, beside 30 programs of somebody else": Fault(
        {"node4": _ONE_PROCESSOR},
        {"node4": _ALL_PROCESSORS},
        {"PRF03": ("fail", "node4")},
        level="bench",
        options=["--only", "PRF03"],  # other checks say that there is only one processor
    ),
    "what node2 sends to the NFS port limited to 50 Mbit/s": Fault(
        _limit("node2", "dport 2049 0xffff", "50mbit"),
        _no_limit("node2"),
        {"PRF04": ("warn", "node2")},
        level="bench",
        options=["--only", "PRF04"],
    ),
    "128 kbit/s from node2 to node4": Fault(
        _limit("node2", "dst {node4}", "128kbit", "100"),
        _no_limit("node2"),
        {"NET06": ("warn", "node2 <-> node4")},
        level="full",
        options=["--only", "NET06"],  # everything else is slow too
    ),
}
