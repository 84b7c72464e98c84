"""The network of jobs: routes, interfaces, packet sizes, ports, and the variables that choose among them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_interface
from typing import Any

from mpitrain.check.check import Ask, Check, Finding, NotHereError, Seen, through_ssh
from mpitrain.check.report import fold
from mpitrain.check.target import Target
from mpitrain.launch.hostfile import Host
from mpitrain.launch.variables import port_ranges

# Interfaces that lead to containers, virtual machines or tunnels, not to the cluster's network.
_SIDEWAYS = re.compile(r"(lo|docker|br-|virbr|veth|cni|cali|flannel|podman|lxc|wg|tun|tap|tailscale|zt|ppp)\S*")
# With one of these variables, a library uses only the named interface.
_PINS = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")
_WRITE_ENV = "mpitrain check-cluster --write-env mpi.env && export MPITRAIN_ENV_FILE=$PWD/mpi.env"


def _peers(target: Target, host: Host) -> dict[str, Any]:
    return {"peers": {name: address for name, address in target.addresses.items() if name != host.name}}


def _routes(seen: Seen, name: str) -> Iterator[Finding]:
    network = seen.node(name, "network")
    ways: dict[str, list[str]] = {}
    for peer, route in network["routes"].items():
        ways.setdefault(route.get("interface", ""), []).append(peer)
    own_address, login = seen.target.addresses[name], seen.target.login(name)
    own_links = {
        interface
        for interface, link in network["interfaces"].items()
        if own_address in [text.split("/")[0] for text in link["addresses"]]
    }
    held = {
        text.split("/")[0]: f"{text} dev {way}"
        for way, link in network["interfaces"].items()
        for text in link["addresses"]
    }
    sideways = {way for way in ways if _SIDEWAYS.fullmatch(way)} - own_links  # a VPN may be the chosen network
    for interface, peers in ways.items():
        where = fold(peers)
        remedy = f"ssh {login} ip route get {seen.target.addresses[peers[0]]}; ssh {login} ip route"
        if taken := [peer for peer in peers if seen.target.addresses[peer] in held]:
            for peer in taken:
                address = seen.target.addresses[peer]
                text = f"it has the address {address} too, which is {peer}'s: two machines have one address"
                mend = f"ssh {login} sudo ip address del {held[address]}  # remove it from the network's settings too"
                yield Finding("fail", text, f"{address} on {peer} alone", mend)
        elif not interface:
            yield Finding("fail", f"there is no route to {where}", "one through the cluster's network", remedy)
        elif interface in sideways:
            text = f"the route to {where} leaves through {interface}"
            yield Finding("fail", text, "one through the cluster's network", remedy)
    yield from _sources(seen, name, own_links, sideways)
    real = [way for way in ways if way and way not in sideways]
    if len(real) > 1:
        text = f"the other nodes are reached through {len(real)} interfaces: {', '.join(sorted(real))}"
        yield Finding("warn", text, "one, so that it can be chosen for all jobs", f"ssh {login} ip route")
    for peer, route in network["routes"].items():
        own = [
            ip_interface(text).network
            for text in network["interfaces"].get(route.get("interface"), {}).get("addresses", [])
        ]
        if route.get("gateway") and any(
            ip_address(seen.target.addresses[peer]) in net for net in own if net.num_addresses > 1
        ):
            text = f"{peer} is on the same network, but the route goes through the gateway {route['gateway']}"
            yield Finding("warn", text, "no gateway in between", f"ssh {login} ip route")


def _sources(seen: Seen, name: str, own_links: set[str], sideways: set[str]) -> Iterator[Finding]:
    """Check from which of its addresses the node reaches the others, which admit only the one in the inventory.

    Interfaces in `sideways` are already reported, and a route through one also has its address.
    """
    network, own = seen.node(name, "network"), ip_address(seen.target.addresses[name])
    peers: dict[tuple[str, str], list[str]] = {}
    for peer, route in network["routes"].items():
        if route.get("interface") in sideways:
            continue
        if own_links and route.get("source") and ip_address(route["source"]) != own:
            peers.setdefault((route["source"], route["interface"]), []).append(peer)
    is_set_up = seen.nodes[name].get("names", {}).get("set_up")
    for (source, interface), reached in peers.items():
        login = seen.target.login(name)
        line = _own_first(network["interfaces"].get(interface, {}).get("addresses", []), interface, own, source)
        remedy = f"{through_ssh(login, line)}  # until the node restarts; its settings must name {own} first"
        if not line:
            remedy = f"ssh {login} ip route get {seen.target.addresses[reached[0]]}"
        text = f"it reaches {fold(reached)} from {source}, which is not its address in the inventory"
        allowed = f"from {own}: the others admit only that address"
        yield Finding("fail" if is_set_up else "warn", text, allowed, remedy)


def _own_first(texts: Sequence[str], interface: str, own: IPv4Address | IPv6Address, source: str) -> str:
    """Return a line that makes `own` the first address of an interface instead of `source`; empty if it is
    impossible."""
    links = [ip_interface(text) for text in texts]
    first = next((link for link in links if str(link.ip) == source), None)
    if (
        first is None
        or first.version != 4
        or not any(link.ip == own and link.network == first.network for link in links)
    ):
        return ""
    # If the first address is deleted, the next one takes its place. Without this setting, the kernel deletes both.
    setting = f"sudo sysctl -qw net.ipv4.conf.{interface}.promote_secondaries=1"
    return f"{setting} && sudo ip address del {first} dev {interface} && sudo ip address add {first} dev {interface}"


def _doubles(seen: Seen, names: Sequence[str]) -> Iterator[Finding]:
    """Judge networks by the nodes that answered; a duplicate needs two."""
    if any(pin in seen.target.environ for pin in _PINS):
        raise NotHereError("your environment names the interface to use")
    owners: dict[tuple[str, str], list[str]] = {}
    for name in names:
        network = seen.node(name, "network")
        used = {route.get("interface") for route in network["routes"].values()}
        for interface, link in network["interfaces"].items():
            if interface in used or interface == "lo" or not link["is_up"]:
                continue
            for own in (ip_interface(text).ip for text in link["addresses"]):
                if not own.is_loopback and not own.is_link_local:
                    state = "" if link["is_running"] else ", without a carrier"
                    owners.setdefault((interface, f"{own}{state}"), []).append(name)
    for (interface, address), nodes in owners.items():
        if len(nodes) > 1:
            for name in nodes:
                text = f"{interface} has the address {address}, and other nodes have the same"
                yield Finding("warn", text, "a setting that names the interface for jobs", _WRITE_ENV, where=(name,))


def _links(seen: Seen, name: str) -> Iterator[Finding]:
    def used(node: str) -> tuple[str, Mapping[str, Any]]:
        network = seen.node(node, "network")
        interface = next((way["interface"] for way in network["routes"].values() if way), "")
        return interface, network["interfaces"].get(interface, {})

    interface, link = used(name)
    others = [
        seen.nodes[node]["network"] for node in seen.target.names if "interfaces" in seen.nodes[node].get("network", {})
    ]
    speeds = [
        used_link["speed_mbit"]
        for network in others
        for used_name in {way.get("interface") for way in network["routes"].values()}
        if (used_link := network["interfaces"].get(used_name, {})).get("speed_mbit")
    ]
    look = f"ssh {seen.target.login(name)} sudo ethtool {interface}  # then try another cable and port"
    if link.get("speed_mbit") and speeds and link["speed_mbit"] < statistics.median(speeds) / 2:
        text = f"{interface} runs at {link['speed_mbit']} Mbit/s"
        yield Finding("fail", text, f"{statistics.median(speeds):g} Mbit/s, as most others", look)
    if link.get("duplex") == "half":
        yield Finding("warn", f"{interface} runs half duplex", "full", look)
    for counter, count in seen.node(name, "counters").get(interface, {}).items():
        if count > 0:
            yield Finding("warn", f"{counter} of {interface} rises", "no errors", look)


def _beside(seen: Seen, name: str) -> Iterator[Finding]:
    if not seen.target.is_here:
        raise NotHereError("between nodes, NET02 compares the interfaces")
    if any(pin in seen.target.environ for pin in _PINS):
        raise NotHereError("your environment names the interface to use")
    cards: list[tuple[str, str]] = []
    virtual: list[tuple[str, str]] = []
    for interface, link in seen.node(name, "network")["interfaces"].items():
        address = next((text for text in link["addresses"] if ip_interface(text).version == 4), None)
        if interface != "lo" and link["is_up"] and link["is_running"] and address:
            (virtual if link["is_virtual"] else cards).append((interface, address))
    if cards and virtual:
        card, address = cards[0]
        text = ", ".join(f"{interface} ({address})" for interface, address in virtual)
        settings = f"OMPI_MCA_btl_tcp_if_include={ip_interface(address).network} UCX_NET_DEVICES={card}"
        remedy = f"export {settings} FI_TCP_IFACE={card}"
        allowed = f"a setting that makes jobs over several machines use {card}"
        yield Finding("warn", f"virtual networks are up beside {card}: {text}", allowed, remedy)


def _taken(seen: Seen, name: str) -> Iterator[Finding]:
    ranges = port_ranges(seen.target.environ)
    if not ranges:
        raise NotHereError("no variable limits the ports of jobs")
    listening = seen.node(name, "ports")
    for variable, (low, high) in ranges.items():
        taken = {port: listening[str(port)] for port in range(low, high + 1) if str(port) in listening}
        if len(taken) == high - low + 1:
            programs = ", ".join(sorted({re.sub(r" \(pid \d+\)", "", by) for by in taken.values()} - {""}))
            text = f"all ports of {variable} ({low} to {high}) are in use{f', by {programs}' if programs else ''}"
            remedy = f"ssh {seen.target.login(name)} sudo ss -Hltnp 'sport >= {low} and sport <= {high}'"
            yield Finding("fail", text, "a range with free ports on all nodes", remedy)


ASKS = (
    Ask("network", "network", "login", _peers),
    Ask("counters", "counters", "login", lambda _target, _host: {"seconds": 1.5}),
    Ask("ports", "ports", "login"),
)
CHECKS = (
    Check(
        "NET01",
        "the routes to the other nodes leave through the cluster's network",
        _routes,
        uses=("network", "names"),
        looks="`ip route get` of every other node's address: through which interface, from which address.",
        why="A route into a tunnel or a container's network leads nowhere, or is slow. The keys of the nodes are valid "
        "only for the addresses of the inventory.",
        remedy="ssh {login} ip route",
        needs=("PRB01", "WGD01"),
        fault="a route through docker0; a second address that comes first; another node's address",
    ),
    Check(
        "NET02",
        "no interface outside the cluster's network has the same address on two nodes",
        _doubles,
        scope="cluster",
        uses=("network",),
        looks="`ip address` of all nodes: interfaces that are up and that no route to a node uses.",
        why="Without a setting, MPI may use docker0 and wait forever. mpitrain run sets the interface, plain mpiexec "
        "does not.",
        remedy=_WRITE_ENV,
        needs=("PRB01", "WGD01"),
        fault="a bridge docker0 with the same address on all nodes",
    ),
    Check(
        "NET10",
        "no virtual network is up beside the card of a machine",
        _beside,
        uses=("network",),
        alone=True,
        looks="On a single machine: interfaces that are up and have an IPv4 address, and which of them are cards.",
        why="In a job over several machines, MPI may choose a virtual network, which leads nowhere, and wait forever.",
        needs=("PRB01",),
        fault="none on a test bed, whose nodes NET02 compares: judged on made-up answers",
    ),
    Check(
        "NET08",
        "the ports that variables give to jobs are free",
        _taken,
        uses=("ports",),
        looks="MPIEXEC_PORT_RANGE and similar variables, against the listening programs (`ss -ltnp`).",
        why="If its ports are in use, a job does not start, and its message is misleading.",
        remedy="ssh {login} sudo ss -ltnp",
        needs=("PRB01",),
        fault="a program on the only port of MPIEXEC_PORT_RANGE",
    ),
    Check(
        "NET05",
        "links run at full speed and without errors",
        _links,
        level="full",
        uses=("network", "counters"),
        looks="/sys/class/net: speed, duplex, and counters of errors, 1.5 s apart.",
        why="A bad cable or port slows one node, and with it every step of every job.",
        remedy="ssh {login} ip -statistics link",
        needs=("PRB01", "NET01"),
    ),
)
