"""The way of a wish from a command to the launcher of a running job: the launcher's socket, and a message each way.

    command: {"leave": [host...]} or {"join": text}      launcher: {"accepted": text} or {"refused": text}

The socket has a name and no file, so it is gone with the launcher. Both sides serve the same user only.

Sent to hosts as text, with the roster. So this module must run with old Pythons.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mpitrain.launch.kept import receive, send, user_of

# The launcher may have to ask hosts for their facts.
_ANSWER_SECONDS = 60.0
_MOST_WAITING = 8
_MESSAGE_SECONDS = 5.0
_LOOK_SECONDS = 0.2


def listen(launcher: str) -> socket.socket:
    """Make the socket of a launcher, which roster.launcher_name names."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(launcher))
        listener.listen(_MOST_WAITING)
    except OSError:
        listener.close()
        raise
    return listener


def serve(
    listener: socket.socket, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]], stop: threading.Event
) -> None:
    """Answer the wishes that come, one after the other, until `stop`."""
    listener.settimeout(_LOOK_SECONDS)
    fault = ""
    while not stop.is_set():
        try:
            line, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError as error:
            if listener.fileno() < 0:  # closed
                return
            if fault != str(error):
                fault = str(error)
                _say(f"no request to change the hosts can be heard now: {fault}")
            stop.wait(_LOOK_SECONDS)
            continue
        with line:
            _serve(line, answer)


def _serve(line: socket.socket, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    try:
        if user_of(line) != os.geteuid():
            return
        line.settimeout(_MESSAGE_SECONDS)
        send(line, dict(answer(receive(line)[0])))
    except Exception as error:  # nobody looks at a thread's error, and the next request may be answered
        _say(f"a request to change the hosts could not be answered: {error!r}")


def ask(launcher: str, wish: Mapping[str, Any]) -> dict[str, Any]:
    """Tell a launcher of this host a wish, and return its answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(_ANSWER_SECONDS)
            line.connect(_address(launcher))
            if user_of(line) != os.geteuid():
                return {"refused": f"its socket belongs to user {user_of(line)}"}
            send(line, dict(wish))
            return receive(line)[0]
    except ConnectionRefusedError:
        text = "its hosts cannot change, because no keepers hold its state meanwhile; start the job with --restarts N"
        return {"refused": text}
    except (OSError, ValueError) as error:
        return {"refused": f"its launcher does not answer: {error}"}


def _address(launcher: str) -> str:
    _, pid, ticks = launcher.split()
    return f"\0mpitrain-wishes-{pid}-{ticks}"


def _say(text: str) -> None:
    print(f"mpitrain: {text}", file=sys.stderr, flush=True)
