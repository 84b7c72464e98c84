"""When the end of a rank closed its files: the kernel's own time, however late the guard looks.

    rank ──near end──(a TCP connection of the rank to itself)──far end──> guard

As a rank ends, the kernel closes the near end and sends a FIN to the far end, within this host. It notes there when the
last packet came. The guard has the far end, and asks for that time (TCP_INFO, tcp(7)).

On a busy host a guard may see an end half a second late. By then mpiexec has ended the ranks of other hosts, whose
guards may look sooner. By the kernel's times, a rank that ended because of another one ended after that one.

This module is sent to other hosts as text. It imports no other module of mpitrain, and runs with an old Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
import time

_CONNECT_SECONDS = 1.0
# Each fork copies the table of files up to the highest number.
_MOST_FILES = 1024
# struct tcp_info of linux/tcp.h begins with the state; tcpi_last_ack_recv is the last of these bytes. A FIN is an ACK.
_INFO_BYTES, _LAST_ACK_AT = 60, 56
_CLOSE_WAIT = 8
# The kernel counts ticks, of up to 10 ms. A look that comes sooner than that is more precise.
_TICK_SECONDS = 0.01


def connect_to_self() -> tuple[socket.socket, socket.socket] | None:
    """Return the near end and the far end. None: this process has no loopback interface, or may not use it."""
    try:
        near = socket.socket()
    except OSError:  # a filter of system calls may forbid it
        return None
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            listener.settimeout(_CONNECT_SECONDS)
            near.settimeout(_CONNECT_SECONDS)
            near.connect(listener.getsockname())
            far, peer = listener.accept()
        if peer == near.getsockname():
            return near, far
        far.close()  # another process has connected in between
    except OSError:
        pass
    near.close()
    return None


def close_first(*connections: socket.socket) -> list[socket.socket]:
    """Give these connections high numbers: the end of this process closes the last of them first, then the one before.

    The end of a process closes its files one by one, that with the highest number first (since Linux 4.3). On a busy
    host others run in between: ranks that see their own connections to this one broken, and end because of that.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if soft < 0 else min(soft, _MOST_FILES)
    moved = list(connections)
    for place, connection in enumerate(connections):
        with contextlib.suppress(OSError):  # no number is left; the connection keeps its own
            number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, most - len(connections) + place)
            moved[place] = socket.socket(fileno=number)
            connection.close()
    return moved


def when_closed(far: int | None) -> float:
    """Return when the near end was closed, by time.monotonic(), or now if that is not known."""
    now = time.monotonic()
    if far is None:
        return now
    with socket.socket(fileno=os.dup(far)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES or info[0] != _CLOSE_WAIT:
        return now
    seconds = float(struct.unpack_from("I", info, _LAST_ACK_AT)[0]) / 1000
    return now if seconds < _TICK_SECONDS else now - seconds
