"""TCP ports of this machine on which nobody listens, for the servers of a test.

They are below those that the kernel gives to connections and to servers without a port of their own, so that no other
test gets one of them meanwhile.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

_LOWEST = 16384


def free_ports_in_a_row(number: int) -> int:
    """The first of so many ports."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert kernels - number > _LOWEST, f"the kernel gives ports from {kernels} on; tests need some from {_LOWEST} on"
    while True:
        first = random.SystemRandom().randrange(_LOWEST, kernels - number)
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def free_port() -> int:
    return free_ports_in_a_row(1)


def free_addresses(number: int) -> list[str]:
    """Different ones of this machine."""
    free: dict[str, None] = {}
    while len(free) < number:
        free[f"127.0.0.1:{free_port()}"] = None
    return list(free)


def free_address() -> str:
    return free_addresses(1)[0]
