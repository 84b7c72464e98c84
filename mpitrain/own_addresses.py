"""The IPv4 addresses of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct

# The ioctl of Linux that returns the address of an interface, see netdevice(7).
_SIOCGIFADDR = 0x8915


def addresses() -> list[str]:
    """Return the IPv4 addresses of this machine's interfaces."""
    result = []
    for _, name in socket.if_nameindex():
        try:
            result.append(address(name))
        except OSError:
            continue  # the interface has no address
    return result


def address(interface: str) -> str:
    """Return the IPv4 address of an interface.

    Raises:
        OSError: there is no such interface, or it has no address (EADDRNOTAVAIL).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
