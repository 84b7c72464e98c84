"""The way of a wish from a command to the launcher of a running job: the launcher's socket, and a text each way.

    command: {"leave": [host...], "join": text}          launcher: {"accepted": text} or {"refused": text}
    command: {"tell": an order, "from": where}           launcher: as Orders.answer says (orders.py)

Both come as texts of any length: the stacks of many ranks do not find room in a message of a socket.

The socket has a name and no file, so it is gone with the launcher. Both sides serve the same user only. A thread
answers each wish, because an answer may take a minute.

Sent to hosts as text, with the roster. So this module must run with old Pythons.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mpitrain.reading import message_of
from mpitrain.watching.sockets import long_text, receive, send_long, user_of

# The launcher may have to ask hosts for their facts.
_ANSWER_SECONDS = 60.0
_MOST_WAITING = 128
_CONNECT_SECONDS = 10.0
_MESSAGE_SECONDS = 5.0
_MOST_ANSWERING = 32
_LAST_SECONDS = 1.0  # a teller who still waits at the end of the job hears of it
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
    listener: socket.socket, answer: Callable[[Mapping[str, Any], int], Mapping[str, Any]], stop: threading.Event
) -> None:
    """Answer the wishes that come, until `stop`. `answer` gets a wish and the user whose it is."""
    answering: list[threading.Thread] = []
    listener.settimeout(_LOOK_SECONDS)
    fault = ""
    while not stop.is_set():
        try:
            line, _ = listener.accept()
        except TimeoutError:
            answering = [one for one in answering if one.is_alive()]
            continue
        except OSError as error:
            if listener.fileno() < 0:  # closed
                return
            if fault != str(error):
                fault = str(error)
                _say(f"no `mpitrain tell` or `scale` can be heard now: {fault}")
            stop.wait(_LOOK_SECONDS)
            continue
        if len(answering) >= _MOST_ANSWERING:
            answering = [one for one in answering if one.is_alive()]
        if len(answering) >= _MOST_ANSWERING:
            line.close()
            continue
        answering.append(threading.Thread(target=_serve, args=(line, answer), name="wish", daemon=True))
        answering[-1].start()
    for one in answering:
        one.join(_LAST_SECONDS)


def _serve(line: socket.socket, answer: Callable[[Mapping[str, Any], int], Mapping[str, Any]]) -> None:
    with line:
        try:
            user = user_of(line)
            if user != os.geteuid():
                return
            line.settimeout(_MESSAGE_SECONDS)
            _send(line, answer(_receive(line), user))
        except Exception as error:  # nobody looks at a thread's error, and the next request may be answered
            _say(f"a request of `mpitrain tell` or `scale` could not be answered: {error!r}")


def ask(launcher: str, wish: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request to a launcher of this host, and return its answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(_ANSWER_SECONDS)
            _connect(line, _address(launcher))
            if user_of(line) != os.geteuid():
                return {"refused": f"its socket belongs to user {user_of(line)}"}
            _send(line, wish)
            return _receive(line)
    except (OSError, ValueError) as error:
        return {"refused": f"its launcher does not answer: {error}"}


def _connect(line: socket.socket, address: str) -> None:
    """Connect; wait for a place in the launcher's queue of connections. Another user may fill this queue."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            line.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _send(line: socket.socket, message: Mapping[str, Any]) -> None:
    send_long(line, {}, json.dumps(message))


def _receive(line: socket.socket) -> dict[str, Any]:
    _, descriptors = receive(line)
    return message_of(long_text(descriptors))


def _address(launcher: str) -> str:
    _, pid, ticks = launcher.split()
    return f"\0mpitrain-wishes-{pid}-{ticks}"


def _say(text: str) -> None:
    print(f"mpitrain: {text}", file=sys.stderr, flush=True)
