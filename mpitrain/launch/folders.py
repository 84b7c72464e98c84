"""The folders of a host in which a job puts files before its ranks run, and why such a folder cannot be used.

`mpitrain run` checks the machine on which it starts. `mpitrain check-cluster` sends this text to every node. So this
module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import os
import socket
import uuid

# Of the roll call, the socket at which ranks register: each host has its own.
OF_SOCKETS = "/tmp"


def why_no_socket(folder: str) -> str:
    """Say why this user cannot make a socket in `folder`; empty if they can. Nothing stays there."""
    path = os.path.join(folder, f"mpitrain-check-{uuid.uuid4().hex[:8]}")  # noqa: PTH118 (bind() takes no Path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(path)
        except OSError as error:
            return error.strerror or str(error)
    os.unlink(path)  # noqa: PTH108
    return ""


def why_no_programs(folder: str) -> str:
    """Say why no program in `folder` can be run; empty if programs can be run."""
    return "it is mounted noexec" if os.statvfs(folder).f_flag & os.ST_NOEXEC else ""
