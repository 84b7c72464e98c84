"""Names: do all nodes agree on host names, /etc/hosts and addresses, and is no node a copy of another?"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from mpitrain.check.check import BY_SSH, Ask, Check, Finding, NotHereError, NotSeenError, Seen, Verdict, on_each

# The marks that set-up writes around its lines in /etc/hosts.
_BEGIN, _END = "# BEGIN mpitrain cluster", "# END mpitrain cluster"


def _same(one: str, other: str) -> bool:
    try:
        return ipaddress.ip_address(one.split("%")[0]) == ipaddress.ip_address(other)
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        return ipaddress.ip_address(name) is not None
    except ValueError:
        return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _own_name(seen: Seen, node: str) -> Iterator[Finding]:
    hostname = seen.node(node, "names")["hostname"]
    if _is_address(node):
        raise NotHereError("it was named by its address")
    if hostname.split(".")[0] != node.split(".")[0]:
        yield Finding("fail", f"it calls itself {hostname}", "the name that it has in the inventory")


def _not_loopback(seen: Seen, node: str) -> Iterator[Finding]:
    names = seen.node(node, "names")
    own = seen.target.addresses[node]
    verdict: Verdict = "warn" if seen.target.is_here else "fail"  # a single machine misleads no other yet
    if names["resolved"].get(node) is None and names["resolved"].get(names["hostname"]) is None:
        raise NotSeenError("the search for its own name did not end")
    for name in dict.fromkeys([node, names["hostname"]]):
        if names["resolved"].get(name) == []:
            subject, remedy = ("its own name", "") if name == node else ("the name that it calls itself", _SET_HOSTNAME)
            yield Finding(verdict, f"{subject} is not known", f"{own} alone", remedy)
            return
        for address in names["resolved"].get(name) or ():
            if _is_loopback(address) and not (seen.target.is_here and _is_loopback(own)):
                yield Finding(verdict, f"its own name leads to {address}", f"{own} alone")
                return


def _same_view(seen: Seen, node: str) -> Iterator[Finding]:
    names = seen.node(node, "names")
    for host in seen.target.hosts:
        addresses = names["resolved"].get(host.name)
        allowed = f"{host.address} alone, as in the inventory"
        if addresses is None:
            observed = f"the search for the name {host.name} did not end: a DNS server is asked that does not answer"
            yield Finding("fail", observed, allowed, remedy=_DNS)
            continue
        if host.name == node:
            # NAM02 checks those.
            addresses = [one for one in addresses if not _is_loopback(one)] or [host.address]
        if not addresses:
            yield Finding("fail", f"the name {host.name} is not known", allowed)
        elif wrong := [one for one in addresses if not _same(one, host.address)]:
            verdict: Verdict = "warn" if _same(addresses[0], host.address) and ":" in wrong[0] else "fail"
            yield Finding(
                verdict,
                f"the name {host.name} leads to {', '.join(addresses)}",
                allowed,
                remedy=_without_line(names["hosts"], host.name, wrong[0]),
            )


def _without_line(lines: Sequence[str], name: str, address: str) -> str:
    """Return a line that removes a wrong address of a name from /etc/hosts, or that shows where else it comes from."""
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if name in words[1:] and _same(words[0], address):
            return f"ssh {{login}} \"sudo sed -i '{number}s/^/# /' /etc/hosts\"  # the line: {line.strip()}"
    return _DNS


_DNS = "ssh {login} 'grep ^hosts /etc/nsswitch.conf; cat /etc/resolv.conf'  # files must come first there"


def _block(seen: Seen, node: str) -> Iterator[Finding]:
    names = seen.node(node, "names")
    lines = [line.strip() for line in names["hosts"]]
    if not names["set_up"] and _BEGIN not in lines:
        raise NotHereError("cluster/setup.yml did not write this node's /etc/hosts")
    if _BEGIN not in lines or _END not in lines[lines.index(_BEGIN) :]:
        yield Finding("fail", "/etc/hosts lacks the lines of set-up", "one for each node")
        return
    block = lines[lines.index(_BEGIN) + 1 : lines.index(_END, lines.index(_BEGIN))]
    entries = [line.partition("#")[0].split() for line in block]
    for host in (host for host in seen.target.hosts if not _is_address(host.name)):
        here = [" ".join(words) for words in entries if host.name in words[1:]]
        right = f"{host.address} {host.name}"
        if here != [right]:
            observed = f"set-up's lines of /etc/hosts have {' and '.join(map(repr, here)) or 'nothing'} for {host.name}"
            yield Finding("fail", observed, repr(right))


def _cloud_init(seen: Seen, node: str) -> Iterator[Finding]:
    value = seen.node(node, "names")["cloud_init"]
    if value is None:
        raise NotHereError("there is no cloud-init")
    if value.lower() not in ("", "false", "no", "0"):
        yield Finding("warn", f"cloud-init has manage_etc_hosts: {value}", "manage_etc_hosts: false")


def _own_address(seen: Seen, node: str) -> Iterator[Finding]:
    own = seen.target.addresses[node]
    links = seen.node(node, "names")["links"]
    if not links:
        raise NotSeenError("`ip -j address` gives no interfaces")
    holders = [link for link in links if any(_same(one, own) for one in link["addresses"])]
    if any(link["is_up"] for link in holders):
        return
    if holders:
        remedy = f"ssh {{login}} sudo ip link set {holders[0]['name']} up"
        yield Finding("fail", f"{holders[0]['name']}, which has its address, is down", "up", remedy=remedy)
        return
    others = [
        one for link in links for one in link["addresses"] if not _is_loopback(one) and not one.startswith("fe80")
    ]
    observed = f"the address {own} is on none of its interfaces; they have {', '.join(others) or 'none'}"
    yield Finding("fail", observed, "the address of the inventory on an interface: no NAT between the nodes")


def _no_copies(seen: Seen, nodes: Sequence[str]) -> Iterator[Finding]:
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in nodes:
        names = seen.node(node, "names")
        for identity, value in _identities(names, seen.target.addresses[node]):
            if value:
                owners[identity, value].append(node)
    for (identity, value), same in owners.items():
        verdict, line, then = _COPIES[identity]
        # One node keeps it. The line is the same for all, so that they are one finding.
        remedy = f"{on_each(seen, same[1:], line)}  {then}" if line else then
        for node in same if len(same) > 1 else ():
            yield Finding(
                verdict,
                f"it has the same {identity} as another node: {_short(value)}",
                "one of its own on each node",
                remedy=remedy,
                where=(node,),
            )


def _identities(names: dict[str, Any], address: str) -> Iterator[tuple[str, str]]:
    yield "machine-id", names["machine_id"]
    for key in names["host_keys"]:
        yield "ssh host key", key
    for link in names["links"]:
        if any(_same(one, address) for one in link["addresses"]) and not re.fullmatch(r"[0:]*", link["mac"]):
            yield "MAC address", link["mac"]


def _short(value: str) -> str:
    return value if len(value) < 40 else f"{value[:20]}...{value[-12:]}"


_COPIES: dict[str, tuple[Verdict, str, str]] = {
    "machine-id": (
        "warn",
        "sudo rm -f /etc/machine-id /var/lib/dbus/machine-id && sudo systemd-machine-id-setup",
        "# then restart them",
    ),
    "ssh host key": (
        "fail",
        "sudo rm /etc/ssh/ssh_host_*_key* && sudo ssh-keygen -A",
        "# then here: mpitrain cluster trust && {set_up} --tags ssh",
    ),
    "MAC address": ("fail", "", "set another MAC address in the settings of the virtual machine {node}"),
}

_SET_HOSTNAME = "{set_up} --tags hosts --limit {limit} -e mpitrain_set_hostname=true"
# Remove Debian's line of 127.0.1.1, remove the name from the lines of loopback, and add a line for the name.
_OWN_LINE = (
    r"sudo sed -i -E -e '/^127\.0\.1\.1\s/d' -e '/^127\./s/\s{node}(\s|$)/\1/g' /etc/hosts && "
    "echo '{address} {node}' | sudo tee -a /etc/hosts"
)

ASKS = (Ask("names", "names", "login", lambda target, _host: {"names": target.names}),)
CHECKS = (
    Check(
        "NAM01",
        "the host name is the name in the inventory",
        _own_name,
        uses=("names",),
        looks="uname -n, up to its first dot, against the inventory.",
        why="Launchers identify this machine by its host name. With a wrong name, MPI jobs hang or start elsewhere.",
        remedy=_SET_HOSTNAME,
        needs=BY_SSH,
        fault="hostname changed",
    ),
    Check(
        "NAM07",
        "no node is a copy of another",
        _no_copies,
        scope="cluster",
        uses=("names",),
        looks="/etc/machine-id, /etc/ssh/ssh_host_*_key.pub, and the MAC address of the interface with the address.",
        why="Copies of a disk image share their identity: DHCP gives them the same address, ssh cannot tell them "
        "apart.",
        needs=BY_SSH,
        fault="the same machine-id on two nodes; the same host key on two nodes",
    ),
    Check(
        "NAM06",
        "the node has the address of the inventory",
        _own_address,
        uses=("names",),
        looks="ip -j address: an interface that is up must have the address.",
        why="Ranks tell each other the addresses of their own interfaces; behind NAT, no other node can reach those.",
        remedy="ssh {login} ip address  # then correct ansible_host in the inventory: did DHCP give another address?",
        needs=(*BY_SSH, "CON02"),
        fault="none on a test bed, where a node can be reached only at its own addresses: judged on made-up answers",
    ),
    Check(
        "NAM04",
        "/etc/hosts has the lines of set-up, unchanged",
        _block,
        uses=("names",),
        looks="The block between the marks in /etc/hosts: one line for each node, as in the inventory.",
        why="Without the block, a name may lead to different addresses on different nodes.",
        tag="hosts",
        needs=BY_SSH,
        fault="a line of the block edited; the block removed",
    ),
    Check(
        "NAM02",
        "the node's own name is known, and does not lead to loopback",
        _not_loopback,
        uses=("names",),
        alone=True,
        remedy_alone=_OWN_LINE,
        looks="getaddrinfo of the node's own name, as programs call it.",
        why="Gloo, torchrun and older MPIs tell the others this address, and those then connect to themselves.",
        tag="hosts",
        needs=(*BY_SSH, "NAM01"),
        fault="127.0.1.1 and the own name in /etc/hosts",
    ),
    Check(
        "NAM03",
        "every node's name leads to its address",
        _same_view,
        uses=("names",),
        looks="getaddrinfo of every name of the inventory, on every node.",
        why="A name that leads elsewhere on one node breaks only the jobs that use that node.",
        tag="hosts",
        needs=(*BY_SSH, "NAM04"),
        fault="a wrong address of another node in /etc/hosts, outside of the block",
    ),
    Check(
        "NAM05",
        "cloud-init leaves /etc/hosts alone",
        _cloud_init,
        uses=("names",),
        looks="manage_etc_hosts in /etc/cloud/cloud.cfg and cloud.cfg.d; the last value counts.",
        why="Otherwise cloud-init replaces /etc/hosts at the next start, and the names are gone.",
        tag="hosts",
        needs=BY_SSH,
        fault="manage_etc_hosts: true",
    ),
)
