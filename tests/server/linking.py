"""Links of a server and its workers, for tests: in this process, and in one that can be killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jobs import HANG_SECONDS, clean_environment
from mpitrain.server.security import ServerKeys, WorkerKey, make_keys
from mpitrain.server.server_link import Event, ServerLink
from mpitrain.server.wire import Message, Peer
from mpitrain.server.worker_link import WorkerLink

KEYS = make_keys()
MOST = 2**23
# Says hello, and then waits for messages.
WORKER = """
import sys
import threading
from mpitrain.server.security import parse_key
from mpitrain.server.worker_link import WorkerLink
link = WorkerLink([sys.argv[1]], parse_key(sys.argv[2], "the key"), 2**23, silence_seconds=float(sys.argv[3]))
link.send("hello", {"number": 1})
while True:
    link.receive(60.0)
"""


def a_server(
    *, keys: ServerKeys = KEYS, address: str = "127.0.0.1:*", plain: str = "", silence: float = 10.0
) -> ServerLink:
    return ServerLink(address, keys, MOST, plain=plain, silence_seconds=silence)


def a_worker(server: ServerLink, key: WorkerKey = KEYS.worker, *, plain: bool = False) -> WorkerLink:
    return WorkerLink([server.address], key, MOST, plain=plain)


def until(server: ServerLink, holds: Callable[[list[Event]], bool]) -> list[Event]:
    """All events until these have come."""
    events: list[Event] = []
    deadline = time.monotonic() + HANG_SECONDS
    while not holds(events):
        assert time.monotonic() < deadline, events
        events += server.receive(1.0)
    return events


def one_message(server: ServerLink) -> Message:
    (message,) = until(server, bool)
    assert isinstance(message, Message)
    return message


def reply(server: ServerLink, worker: WorkerLink) -> Message:
    """The next message of the server, while both sides look."""
    deadline = time.monotonic() + HANG_SECONDS
    while (message := worker.receive(0.1)) is None:
        assert time.monotonic() < deadline
        assert server.receive(0.0) == []
    return message


@contextmanager
def worker_process(server: ServerLink, silence: float) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WORKER, server.address, KEYS.worker.text, str(silence)]
    process = subprocess.Popen(command, env=clean_environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def greeted(server: ServerLink, worker: WorkerLink) -> Peer:
    """The worker says hello: the server has to look while it waits to come in. The worker, as the server knows it."""
    send = threading.Thread(target=worker.send, args=("hello", {}))
    send.start()
    peer = one_message(server).peer
    send.join()
    return peer
