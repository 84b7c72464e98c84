"""The bed's network: a bridge in the controller's namespace, and one cable to each node. All of it is in namespaces
that the bed made. So no name or address can clash with the machine's own, and no other network can be reached."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from mpitrain.errors import ConfigError, LaunchError
from testbed import processes
from testbed.bed_record import BedRecord
from testbed.processes import execute, start_in_background, wait_until

BRIDGE = "bridge"
REPOSITORY_PORT = 8000
MTU_BYTES = 1500
_TABLE = "mpitrain_testbed"
# A bucket of a few tens of KiB drops bursts. Then one would measure TCP's time-outs, not the rate.
SHAPER = ["burst", "256kb", "latency", "400ms"]


def make_controller(record: BedRecord) -> None:
    """Make the controller's namespace with the bridge, whose address is the controller's."""
    _add_namespace(record.namespace)
    _ip(
        record.namespace,
        "link set lo up",
        f"link add {BRIDGE} type bridge forward_delay 0 stp_state 0",
        f"addr add {record.controller}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    )


def make_cable(record: BedRecord, node: str) -> None:
    """Make the node's namespace, and a cable from its eth0 to the bridge. The end at the bridge has the node's name."""
    there = record.node_namespace(node)
    _add_namespace(there)
    if record.delay_microseconds:
        _make_slow_cable(record, node)
    else:
        _ip(record.namespace, f"link add {node} type veth peer name eth0 netns {there}")
    _ip(record.namespace, f"link set {node} master {BRIDGE}", f"link set {node} up")
    _ip(there, "link set lo up", f"addr add {record.address(node)}/24 dev eth0", "link set eth0 up")


def make_tap(record: BedRecord, node: str) -> None:
    """Make the bridge's end of a cable to a node with its own kernel, which holds the other end."""
    _ip(
        record.namespace,
        f"tuntap add dev {node} mode tap",
        f"link set {node} master {BRIDGE}",
        f"link set {node} up",
    )


def _make_slow_cable(record: BedRecord, node: str) -> None:
    log = record.node_folder(node) / "wire.log"
    command = [str(record.image_folder / "wire"), record.node_namespace(node), "eth0", record.namespace, node]
    command.append(str(record.delay_microseconds))
    start_in_background(processes.in_group(processes.group(record.name, "wires"), command), log)
    if not wait_until(lambda: log.read_text().endswith("up\n"), timeout_seconds=60):
        raise LaunchError(f"{node}: the cable with a delay did not come up: {log.read_text()}")


def remove(record: BedRecord) -> None:
    """Remove the bed's namespaces, with everything in them."""
    for name in [record.node_namespace(node) for node in record.names] + [record.namespace]:
        if Path("/run/netns", name).exists():
            execute(["ip", "netns", "del", name])


def set_link(record: BedRecord, node: str, up: bool) -> None:
    """Plug the node's cable in at the bridge, or pull it out."""
    _ip(record.namespace, f"link set {node} {'up' if up else 'down'}")


def link_bytes(record: BedRecord, node: str) -> int:
    """Return the bytes that crossed the node's cable since it was made, in both directions together."""
    inside = _in_namespace(record.namespace, ["cat", "/proc/net/dev"])
    counters = re.search(rf"^ *{node}: *(\d+)(?: +\d+){{7}} +(\d+)", inside, re.M)
    if counters is None:
        raise LaunchError(f"{node} has no cable at the bridge of test bed {record.name}")
    return int(counters[1]) + int(counters[2])


def shape(record: BedRecord, node: str, rate: str | None, *, both_ends: bool) -> None:
    """Limit the node's cable to `rate` (1gbit, 100mbit; tc(8)); None: no limit. At the bridge's end, or at both."""
    ends = [(record.namespace, node)]
    if both_ends:
        ends.append((record.node_namespace(node), "eth0"))
    for namespace, interface in ends:
        if rate is None:
            with suppress(LaunchError):  # there was no limit
                execute(["tc", "-n", namespace, "qdisc", "del", "dev", interface, "root"])
        else:
            execute(["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate, *SHAPER])


def checked_rate(rate: str) -> str:
    """Return `rate` if tc would accept it."""
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]?bit", rate):
        raise ConfigError(f"{rate!r} is not a rate; write it as 1gbit, 100mbit or 500kbit")
    return rate


def set_mtu(record: BedRecord, node: str, mtu_bytes: int) -> None:
    """Set the MTU of the node's own interface. The bridge's end keeps 1500, like a switch without jumbo frames."""
    _ip(record.node_namespace(node), f"link set eth0 mtu {mtu_bytes}")


def checked_ports(ports: str) -> str:
    """Return `ports` if it is a list such as 22 or 111,2049,50000-50300."""
    parts = [part.split("-") for part in ports.split(",")]
    for part in parts:
        numbers = [int(number) if number.isdecimal() else -1 for number in part]
        if len(part) > 2 or not all(0 < number < 65536 for number in numbers) or numbers != sorted(numbers):
            raise ConfigError(f"{ports!r} is not a list of ports; write it as 22 or 111,2049,50000-50300")
    return ports


def set_node_filters(record: BedRecord, node: str, filters: dict[str, str]) -> None:
    """Drop or reject packets to a container, in a separate table that a firewall inside does not touch."""
    rules = [f"meta l4proto {{ tcp, udp }} th dport {{ {ports} }} {kind}" for kind, ports in filters.items()]
    _replace_table(record.node_namespace(node), f"inet {_TABLE}", {"input hook input priority -300": rules})


def set_bridge_filters(record: BedRecord, node: str, filters: dict[str, str]) -> None:
    """Drop or reject packets to a node with its own kernel: at the bridge, from other nodes and from the controller."""
    to_node = f"ip daddr {record.address(node)} meta l4proto {{ tcp, udp }} th dport"
    rules = [f"{to_node} {{ {ports} }} {kind}" for kind, ports in filters.items()]
    table = f"{_TABLE}_{node}"
    _replace_table(record.namespace, f"bridge {table}", {"passing hook prerouting priority -300": rules})
    _replace_table(record.namespace, f"inet {table}", {"output hook output priority -300": rules})


def _add_namespace(name: str) -> None:
    # The command ends with this process. Otherwise, if `up` is killed, it might make the namespace after `down` has
    # run.
    execute(["setpriv", "--pdeathsig", "KILL", "ip", "netns", "add", name])


def _replace_table(namespace: str, table: str, chains: dict[str, list[str]]) -> None:
    text = f"table {table}\ndelete table {table}\n"
    for chain, rules in chains.items():
        name, _, hook = chain.partition(" ")
        if rules:
            text += f"table {table} {{ chain {name} {{ type filter {hook};\n" + "\n".join(rules) + "\n}\n}\n"
    execute(["ip", "netns", "exec", namespace, "nft", "-f", "-"], input=text)


def _ip(namespace: str, *lines: str) -> None:
    execute(["ip", "-n", namespace, "-batch", "-"], input="".join(f"{line}\n" for line in lines))


def _in_namespace(namespace: str, command: list[str]) -> str:
    return execute(["ip", "netns", "exec", namespace, *command])
