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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # the interface has no address
            result.append(socket.inet_ntoa(answer[20:24]))
    return result
