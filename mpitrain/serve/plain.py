"""Connections without encryption: only where nobody else can read them, on this machine or in a tunnel.

Encryption takes time, which counts on networks of 10 Gbit/s. A tunnel encrypts in the kernel, or with several cores.
Whoever connects still has to prove that it has the key, by a password that follows from it.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.job import own_addresses

LOOPBACK = "lo"
_INTERFACES = Path("/sys/class/net")
# ARPHRD_NONE of if_arp.h: WireGuard, and tun as VPNs have it. A tunnel that does not encrypt (GRE, IPIP, SIT) has
# another type, and so has every card.
_TUNNEL = 65534
_ALLOWED = (
    f"allowed are {LOOPBACK}, for an ssh tunnel that ends on this machine, and an interface of WireGuard or a tun"
)


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface whose connections nobody else can read.

    Raises:
        ConfigError: it is another kind of interface, there is none of this name, or it has no address.
    """
    if interface == LOOPBACK:
        return "127.0.0.1"
    _check_tunnel(interface)
    try:
        return own_addresses.address(interface)
    except OSError as error:
        why = "it has no IPv4 address" if error.errno == errno.EADDRNOTAVAIL else error.strerror
        raise ConfigError(f"--plain {interface}: {why}; see `ip address show dev {interface}`") from None


def check_way(host: str) -> None:
    """Refuse a server that this machine would reach over a network that others can read, by any of its addresses.

    Raises:
        ConfigError: the way to an address of `host` is such a network; or there is no way, or no address.
    """
    try:
        answers = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(f"--plain: there is no way to {host}: {error.strerror}; is the name right?") from None
    for answer in answers:
        if not way_to(ip := str(answer[4][0])):
            raise ConfigError(f"--plain: there is no way to {host} ({ip}); see `ip route get {ip}`")


def way_to(ip: str) -> str:
    """Return the interface by which this machine reaches an address; "" if there is no way now.

    Raises:
        ConfigError: others can read what goes over this interface.
    """
    try:
        (answer,) = socket.getaddrinfo(ip, 1, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        with socket.socket(answer[0], socket.SOCK_DGRAM) as way:
            way.connect(answer[4])
            own = str(way.getsockname()[0])
    except OSError:
        return ""
    if ipaddress.ip_address(own).is_loopback:
        return LOOPBACK
    interface = next((path.name for path in sorted(_INTERFACES.iterdir()) if _has(path.name, own)), "")
    # A server at a tunnel's own address is confined to the tunnel, and a socket that is confined to lo cannot reach it.
    if own == ip and not (interface and _is_tunnel(interface)):
        return LOOPBACK
    if not interface:
        raise ConfigError(f"--plain: the interface to {ip}, with the address {own}, is not known; {_ALLOWED}")
    _check_tunnel(interface)
    return interface


def _check_tunnel(interface: str) -> None:
    known = sorted(path.name for path in _INTERFACES.iterdir())
    if interface not in known:
        raise ConfigError(f"--plain {interface}: there is no such interface; there are {', '.join(known)}; {_ALLOWED}")
    if not _is_tunnel(interface):
        raise ConfigError(
            f"--plain: {interface} is no tunnel, so others could read and change what is sent; {_ALLOWED}. Leave out "
            "--plain, and all bytes are encrypted"
        )


def _is_tunnel(interface: str) -> bool:
    return int((_INTERFACES / interface / "type").read_text()) == _TUNNEL


def _has(interface: str, address: str) -> bool:
    try:
        return own_addresses.address(interface) == address
    except OSError:
        return False
