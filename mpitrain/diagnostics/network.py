"""Network interfaces and this host's own name: what another machine would be told to connect to."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpitrain.diagnostics.finding import Finding

_SIOCGIFADDR = 0x8915
_SIOCGIFNETMASK = 0x891B


@dataclass(frozen=True)
class Interface:
    """A network interface; loopback is left out."""

    name: str
    address: str | None  # IPv4 with prefix length, such as "192.168.1.5/24"
    is_up: bool
    is_virtual: bool  # a bridge, container or virtual machine network, VPN: not a card
    mbit_per_second: int | None


@dataclass(frozen=True)
class Facts:
    """Interfaces and names."""

    hostname: str
    addresses: list[str]  # what the host's own name resolves to
    interfaces: list[Interface]

    def lines(self) -> list[tuple[str, str]]:
        """For people."""
        lines = [("Host name", f"{self.hostname}, which is {', '.join(self.addresses) or 'not known here'}")]
        for interface in self.interfaces:
            words = [
                interface.address or "no IPv4 address",
                "up" if interface.is_up else "down",
                "virtual" if interface.is_virtual else "a card",
            ]
            if interface.mbit_per_second:
                words.append(f"{interface.mbit_per_second} Mbit/s")
            lines.append((f"Network {interface.name}", ", ".join(words)))
        return lines


def collect() -> Facts:
    """Look at the interfaces and resolve this host's name."""
    hostname = socket.gethostname()
    addresses: list[str] = []
    with suppress(OSError):
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(hostname, None, socket.AF_INET)})
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    return Facts(hostname, addresses, [_interface(name) for name in names])


def _interface(name: str) -> Interface:
    system = Path("/sys/class/net", name)

    def read(entry: str) -> str:
        try:
            return (system / entry).read_text().strip()
        except OSError:  # also for entries that an interface of this kind does not have
            return ""

    speed = read("speed")
    return Interface(
        name=name,
        address=_address(name),
        is_up=read("operstate") in ("up", "unknown"),
        is_virtual="/devices/virtual/" in str(system.resolve()),
        mbit_per_second=int(speed) if speed.isdecimal() else None,
    )


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as question:
        try:
            answers = [
                fcntl.ioctl(question, request, struct.pack("256s", name.encode()[:15]))
                for request in (_SIOCGIFADDR, _SIOCGIFNETMASK)
            ]
        except OSError:
            return None
    address, mask = (socket.inet_ntoa(answer[20:24]) for answer in answers)
    return str(ipaddress.ip_interface(f"{address}/{mask}"))


def judge(facts: Facts) -> list[Finding]:
    """What would keep other machines from reaching this one, or lead MPI to the wrong interface."""
    findings = []
    usable = [interface for interface in facts.interfaces if interface.is_up and interface.address]
    cards = [interface for interface in usable if not interface.is_virtual]
    own = cards[0].address.partition("/")[0] if cards and cards[0].address else "ADDRESS"
    if not facts.addresses:
        findings.append(
            Finding(
                "warn",
                f"the host's own name {facts.hostname} does not resolve",
                "MPI libraries look their own host up at the start, and some fail or wait.",
                f"echo '{own} {facts.hostname}' | sudo tee -a /etc/hosts",
            )
        )
    elif cards and all(ipaddress.ip_address(address).is_loopback for address in facts.addresses):
        findings.append(
            Finding(
                "warn",
                f"the host's own name {facts.hostname} resolves to {', '.join(facts.addresses)}",
                "In a job over several machines this one would tell the others to connect to themselves.",
                rf"sudo sed -i -E -e '/^127\.0\.1\.1\s/d' -e '/^127\./s/\s{re.escape(facts.hostname)}(\s|$)/\1/g' "
                "/etc/hosts && "
                f"echo '{own} {facts.hostname}' | sudo tee -a /etc/hosts",
            )
        )
    virtual = [interface for interface in usable if interface.is_virtual]
    if cards and virtual:
        subnet = ipaddress.ip_interface(cards[0].address or "").network
        findings.append(
            Finding(
                "warn",
                f"virtual networks are up beside {cards[0].name}: "
                + ", ".join(f"{interface.name} ({interface.address})" for interface in virtual),
                "In a job over several machines MPI may choose one of them, which leads nowhere, and wait for ever.",
                f"export OMPI_MCA_btl_tcp_if_include={subnet} UCX_NET_DEVICES={cards[0].name} "
                f"FI_TCP_IFACE={cards[0].name}",
            )
        )
    return findings
