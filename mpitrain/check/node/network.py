"""The network of a node: interfaces, routes, firewall, ports, counters, variables, and the tunnel to the others."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import re
import shlex
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain import facts
from mpitrain.check.node import children

# From linux/sockios.h and linux/if.h.
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_FLAGS = {0x1: "UP", 0x10000: "LOWER_UP"}
_TUNNEL = "mpitrain"


def network(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the interfaces, and the route to each of `peers` (name -> address)."""
    interfaces = {}
    links = addresses()
    for link in links:
        name = link["ifname"]
        folder = "/sys/class/net/" + name
        speed = facts.text(folder + "/speed").strip()
        interfaces[name] = {
            "is_up": "UP" in link["flags"],
            # A bridge, a tunnel, or one half of a container's cable is not a card.
            "is_virtual": "/devices/virtual/" in os.path.realpath(folder),
            "is_running": "LOWER_UP" in link["flags"],
            "mtu_bytes": link["mtu"],
            "addresses": facts.addresses(link),
            # Temporary addresses change every day, for privacy.
            "temporary": [one["local"] for one in link.get("addr_info", []) if one.get("temporary")],
            "speed_mbit": int(speed) if speed.isdigit() else None,
            "duplex": facts.text(folder + "/duplex").strip(),
        }
    routes = {name: _ip_json("route", "get", address) for name, address in wish["peers"].items()}
    return {
        "interfaces": interfaces,
        "routes": facts.routes(routes, links),
        "rdma": facts.rdma_devices(),
        "firewall": _firewall(),
    }


def addresses() -> list[dict[str, Any]]:
    """Return interfaces and addresses in the form of `ip -j address`; without ip, from the kernel's own calls."""
    try:
        return _ip_json("address")
    except OSError:
        return [_address(name) for _, name in socket.if_nameindex()]


def _address(name: str) -> dict[str, Any]:
    """Return the result of the kernel's older calls: only the first IPv4 address."""
    flags = int(facts.text(f"/sys/class/net/{name}/flags").strip() or "0", 16)
    mtu = int(facts.text(f"/sys/class/net/{name}/mtu").strip() or 0)
    info = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as question, suppress(OSError):
        local, mask = (
            socket.inet_ntoa(fcntl.ioctl(question, call, struct.pack("256s", name.encode()[:15]))[20:24])
            for call in (_SIOCGIFADDR, _SIOCGIFNETMASK)
        )
        info = [{"local": local, "prefixlen": ipaddress.ip_network(f"0.0.0.0/{mask}").prefixlen}]
    return {
        "ifname": name,
        "flags": [word for bit, word in _FLAGS.items() if flags & bit],
        "mtu": mtu,
        "address": facts.text(f"/sys/class/net/{name}/address").strip(),
        "addr_info": info,
    }


def _ip_json(*arguments: str) -> list[dict[str, Any]]:
    code, out, _err = children.run(["ip", "-j", *arguments])
    if code == 127:
        raise OSError("there is no program ip: it is in the package iproute2")
    try:
        return [entry for entry in json.loads(out or "[]") if entry]
    except ValueError:
        return []


def _firewall() -> str:
    """Return the active packet filter, as far as it can be detected; empty if there is none."""
    if re.search(r"^ENABLED=yes", facts.text("/etc/ufw/ufw.conf"), re.M):
        return "ufw"
    if children.output("systemctl", "is-active", "firewalld").strip() == "active":
        return "firewalld"
    rules = children.as_root("nft", "list", "ruleset") or ""
    return "nftables" if re.search(r"\b(drop|reject)\b", rules) else ""


def counters(wish: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return how much each interface's error counters rise within `seconds`."""
    before = _counters()
    time.sleep(wish["seconds"])
    after = _counters()
    return {
        name: {counter: count - before[name][counter] for counter, count in counts.items()}
        for name, counts in after.items()
        if name in before
    }


def _counters() -> dict[str, dict[str, int]]:
    names = ("rx_errors", "tx_errors", "rx_crc_errors", "collisions")
    return {
        folder.name: {name: int(facts.text(f"{folder}/statistics/{name}") or 0) for name in names}
        for folder in Path("/sys/class/net").iterdir()
        if (folder / "statistics").is_dir()
    }


def ports(_wish: dict[str, Any]) -> dict[str, str]:
    """Return the TCP ports with a listener, each with its program if that can be seen."""
    programs = {}
    for line in (children.as_root("ss", "-Hltnp") or children.output("ss", "-Hltn")).splitlines():
        fields = line.split()
        program = re.search(r'"([^"]+)",pid=(\d+)', line)
        programs[fields[3].rpartition(":")[2]] = "{} (pid {})".format(*program.groups()) if program else ""
    return programs


def variables(_wish: dict[str, Any]) -> dict[str, str]:
    """Return the variables that choose networks and ports, from a login shell of this user."""
    shell = os.environ.get("SHELL", "/bin/sh")
    out = children.output(shell, "-lc", shlex.join(["env", "-0"]))
    environ = dict(entry.split("=", 1) for entry in out.split("\0") if "=" in entry)
    chosen = re.compile(r"(UCX|FI|OMPI_MCA|PRTE_MCA|I_MPI|HYDRA|NCCL|GLOO|MPIEXEC)_\w+")
    return {name: value for name, value in environ.items() if chosen.fullmatch(name)}


def tunnel(_wish: dict[str, Any]) -> dict[str, Any]:
    """Return the running tunnel: its addresses, its public key, and the others' keys by address."""
    folder = children.as_root("ls", "/etc/wireguard/mpitrain.d")
    if folder is None:
        return {"is_known": False}
    peers = {}
    for line in _shown("allowed-ips").splitlines():
        key, *networks = line.split()
        peers.update({network.partition("/")[0]: key for network in networks})
    return {
        "is_known": True,
        "is_set_up": bool(folder.strip()),
        "addresses": facts.local_addresses(addresses(), _TUNNEL),
        "key": _shown("public-key").strip(),
        "peers": peers,
        "gate": facts.gate(children.as_root("nft", "-s", "list", "table", "inet", _TUNNEL) or ""),
    }


def _shown(field: str) -> str:
    # Never all fields, which would include the private key.
    return children.as_root("wg", "show", _TUNNEL, field) or ""


CALLS = {"network": network, "counters": counters, "ports": ports, "variables": variables, "tunnel": tunnel}
