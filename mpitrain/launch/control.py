"""The socket of a launcher, at which others watch its job (live.py) or tell it something: where it is, and a request.

    {"wish": {"leave": [host...], "join": text}}    {"answer": {"accepted": text} or {"refused": text}}
    {"wish": {"tell": an order, "from": where}}     {"answer": as Orders.answer says (orders.py)}

docs/reference/formats-and-protocols.md has the other requests, and what comes with each.

Sent to hosts as text, with the roster. So this module must run with old Pythons.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.facts import OF_SOCKETS
from mpitrain.reading import MessageLines
from mpitrain.watching.sockets import user_of

VERSION = 1
SUFFIX = ".live"
_CONNECT_SECONDS = 5.0
# The launcher may have to ask hosts for their facts.
_ANSWER_SECONDS = 60.0
_READ_BYTES = 1 << 20


def folder_of_sockets() -> Path:
    """Return the folder with the sockets of this user's launchers. It may not be there."""
    return Path(OF_SOCKETS, f"mpitrain-live-{os.geteuid()}")


def socket_of(launcher: str) -> Path:
    """Return the path of the socket of a launcher of this user, which roster.launcher_name names."""
    return folder_of_sockets() / (launcher.replace(" ", "~") + SUFFIX)


def ask(launcher: str, wish: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request to a launcher of this host, and return its answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_CONNECT_SECONDS)
            line.connect(str(socket_of(launcher)))
            if user_of(line) != os.geteuid():
                return {"refused": f"its socket belongs to user {user_of(line)}"}
            line.sendall(json.dumps({"wish": wish, "version": VERSION}).encode() + b"\n")
            line.settimeout(_ANSWER_SECONDS)
            received = MessageLines()
            while data := line.recv(_READ_BYTES):
                for told in received.take(data):
                    return dict(told["answer"]) if "answer" in told else {"refused": str(told.get("error"))}
            raise ConnectionResetError("the other side has hung up")
    except (OSError, ValueError) as error:
        return {"refused": f"its launcher does not answer: {error}"}
