"""The folders of a host in which a job puts what it needs before its ranks run, and why they will not do.

`mpitrain run` asks on the machine that it starts on. `mpitrain check-cluster` sends this text to every node: it imports
nothing of ours, and does with an old Python.
"""

from __future__ import annotations

import os
import socket
import uuid

# Of the socket at which ranks call: on every host, of that host alone.
OF_SOCKETS = "/tmp"


def why_no_socket(folder: str) -> str:
    """Why this user cannot make a socket in `folder`; empty where it can. Nothing is left there."""
    path = os.path.join(folder, f"mpitrain-check-{uuid.uuid4().hex[:8]}")  # noqa: PTH118 (bind() takes no Path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(path)
        except OSError as error:
            return error.strerror or str(error)
    os.unlink(path)  # noqa: PTH108
    return ""


def why_no_programs(folder: str) -> str:
    """Why no program in `folder` can be run; empty where it can."""
    return "it is mounted noexec" if os.statvfs(folder).f_flag & os.ST_NOEXEC else ""
