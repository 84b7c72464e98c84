"""What a server makes of peers that are no workers: nothing, and its workers do not notice."""

from __future__ import annotations

import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import zmq

from jobs import HANG_SECONDS, until
from mpitrain.server.registry import RejectedPeers
from mpitrain.server.security import WorkerKey, make_keys, read_keys
from mpitrain.server.server_link import ENDED, Disconnected, ServerLink
from mpitrain.server.wire import Message, frames
from mpitrain.server.worker_link import WorkerLink

KEYS = make_keys()
MOST = 2**20


class Served:
    """A server that answers all messages, in a thread of its own, and a worker of it."""

    def __init__(self) -> None:
        self.link = ServerLink("127.0.0.1:*", KEYS, MOST)
        self.host, port = self.link.address.split(":")
        self.port = int(port)
        self.events: list[Message | Disconnected] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.worker = WorkerLink([self.link.address], KEYS.worker, MOST)
        self.ask()

    def _serve(self) -> None:
        while not self._stop.is_set():
            for event in self.link.receive(0.05):
                self.events.append(event)
                if isinstance(event, Message):
                    self.link.send(event.peer, "answer", event.fields, event.arrays)

    def ask(self) -> None:
        """The worker is served: it gets its own numbers back."""
        number = random.getrandbits(40)
        self.worker.send("question", {"number": number}, [numpy.arange(1000)])
        deadline = time.monotonic() + HANG_SECONDS
        while (message := self.worker.receive(1.0)) is None:
            assert time.monotonic() < deadline, self.worker.trouble()
        assert message.fields == {"number": number}

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.worker.close()
        self.link.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with closing(Served()) as made:
        yield made


@pytest.fixture(autouse=True)
def nobody_notices(served: Served) -> Iterator[None]:
    """The worker of the server has the same connection, and is answered as before."""
    num_peers = len({event.peer for event in served.events})
    yield
    served.ask()
    assert {type(event) for event in served.events} == {Message}
    assert len({event.peer for event in served.events}) == num_peers == 1


# A greeting of ZMTP 3.1 with mechanism NULL, 3.0 with CURVE and as a server, 2.0 and 1.0, and other protocols.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03"
GREETINGS = {
    "NULL": GREETING + b"\x01" + b"NULL".ljust(20, b"\0") + bytes(32),
    "CURVE": GREETING + b"\x00" + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31),
    "an unknown mechanism": GREETING + b"\x00" + b"X" * 20 + bytes(32),
    "ZMTP 2": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
    "ZMTP 1": b"\x01\x00\x05hello" * 10,
    "a huge frame of ZMTP 1": b"\xff" + b"\x7f" * 8 + bytes(64),
    "HTTP": b"GET / HTTP/1.1\r\nHost: lab1\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(197),
    "ssh": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("greeting", GREETINGS)
def test_other_protocols(served: Served, greeting: str) -> None:
    with socket.create_connection((served.host, served.port), 10.0) as stranger:
        stranger.sendall(GREETINGS[greeting])
        served.ask()
        if greeting == "CURVE":  # a command of the handshake that claims to be huge
            stranger.sendall(b"\x06" + b"\x7f" * 8 + b"\x05HELLO")
        try:
            stranger.sendall(os.urandom(1 << 16))
        except OSError:  # the server has had enough
            return


def test_random_bytes(served: Served) -> None:
    rng = random.Random(0)
    for _ in range(50):
        with socket.create_connection((served.host, served.port), 10.0) as stranger:
            try:
                stranger.sendall(
                    rng.choice(list(GREETINGS.values()))[: rng.randrange(64)] + rng.randbytes(rng.randrange(500))
                )
            except OSError:
                continue


def test_connections_that_say_nothing(served: Served) -> None:
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((served.host, served.port), 10.0))
        served.ask()
        joined = WorkerLink([served.link.address], KEYS.worker, MOST)
        with closing(joined):
            deadline = time.monotonic() + HANG_SECONDS
            while "is running" not in joined.trouble():
                assert time.monotonic() < deadline
                joined.receive(0.1)


OF_FEW_FILES = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from mpitrain.server.security import keys_of
from mpitrain.server.server_link import ServerLink
from mpitrain.server.wire import Message

link = ServerLink("127.0.0.1:*", keys_of(Path(sys.argv[1])), 2**20)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(link.address, flush=True)
while True:
    for event in link.receive(0.5):
        if isinstance(event, Message):
            link.send(event.peer, "answer", event.fields)
"""


@pytest.mark.parametrize("leaves", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_more_connections_than_the_server_may_have_files(tmp_path: Path, leaves: bool) -> None:
    """Its worker is answered. Others get in when the stranger leaves, or is sent away, after 30 s without a proof."""
    command = [sys.executable, "-c", OF_FEW_FILES, str(tmp_path / "keys")]
    with ExitStack() as stack:
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(server.kill)
        assert server.stdout is not None
        host, port = (address := server.stdout.readline().strip()).split(":")
        key = read_keys(tmp_path / "keys").worker
        worker = stack.enter_context(closing(WorkerLink([address], key, MOST)))
        heard(worker)
        rejected_peers = [socket.create_connection((host, int(port)), 10.0) for _ in range(100)]
        for one in rejected_peers:
            stack.callback(one.close)
        rejected_peers[0].sendall(GREETINGS["CURVE"])  # and no more of the handshake
        until(lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) == 64)
        heard(worker)
        if leaves:
            for one in rejected_peers:
                one.close()
        else:
            for one in rejected_peers:
                one.settimeout(HANG_SECONDS)
                while one.recv(1000):  # the server's own greeting
                    pass
        heard(stack.enter_context(closing(WorkerLink([address], key, MOST))))
        heard(worker)
        assert worker.connections == 1


def heard(worker: WorkerLink) -> None:
    """The server answers what this worker asks, as soon as the worker is there."""
    until(lambda: worker.receive(0.05) or worker.is_connected)
    number = random.getrandbits(40)
    worker.send("question", {"number": number})
    message = worker.receive(HANG_SECONDS)
    assert message is not None, worker.trouble()
    assert message.fields == {"number": number}


def test_strangers_take_no_memory(served: Served) -> None:
    """A peer without a key cannot make the server take in what it sends."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ExitStack() as stack:
        for greeting in ("NULL", "CURVE", "ZMTP 1", "a huge frame of ZMTP 1"):
            stranger = stack.enter_context(socket.create_connection((served.host, served.port), 10.0))
            stranger.settimeout(1.0)
            try:
                stranger.sendall(GREETINGS[greeting])
                for _ in range(64):
                    stranger.sendall(bytes(1 << 20))
            except OSError:
                continue
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB


def test_the_server_says_who_was_sent_away() -> None:
    """At most a line every 10 s for each kind, however many come."""
    said: list[str] = []
    clock = [0.0]
    with closing(Served()) as served:
        rejected_peers = RejectedPeers(served.link, said.append, lambda: clock[0])
        rejected_peers.look()
        rejected_peers.leave(ENDED)
        assert said == []
        wrong = WorkerKey(KEYS.worker.server_public, make_keys().worker.worker_secret)
        for number in (1, 2):
            with closing(WorkerLink([served.link.address], wrong, MOST)) as worker:
                deadline = time.monotonic() + HANG_SECONDS
                before = served.link.refused
                while served.link.refused == before:
                    assert time.monotonic() < deadline
                    worker.receive(0.1)
            rejected_peers.look()
            assert len(said) == 1, number
        assert re.match(
            r"refused, because they have another key: \d+ connections, at last one from 127\.0\.0\.1; ", said[0]
        )
        clock[0] += 11
        rejected_peers.leave("a frame has 2 bytes")
        rejected_peers.look()
        rejected_peers.look()
        assert len(said) == 3
        assert said[2] == "refused, before they had joined: 1; the last one because a frame has 2 bytes"


def test_a_peer_with_the_key_that_sends_no_messages() -> None:
    """It is told so, counts as gone, and is not listened to any more. Others are."""
    with closing(Served()) as served, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.CURVE_SERVERKEY, KEYS.worker.server_public)
        client.setsockopt(zmq.CURVE_PUBLICKEY, KEYS.worker.worker_public)
        client.setsockopt(zmq.CURVE_SECRETKEY, KEYS.worker.worker_secret)
        client.connect(f"tcp://{served.link.address}")
        client.send_multipart([b"several", b"parts"])
        assert client.poll(1000 * HANG_SECONDS)
        assert b"does not understand this worker: a message of 2 parts came; allowed is 1" in client.recv()
        for frame in frames(1, "hello", {}):
            client.send(frame)
        served.ask()
        assert client.poll(300) == 0
        gone = [event for event in served.events if isinstance(event, Disconnected)]
        assert [event.why for event in gone] == ["a message of 2 parts came; allowed is 1"]
        assert "hello" not in {event.kind for event in served.events if isinstance(event, Message)}


@pytest.mark.parametrize(
    ("key", "plain", "words"),
    [
        (make_keys().worker, False, "the program that listens there is not the server with this key"),
        (
            replace(KEYS.worker, worker_secret=make_keys().worker.worker_secret),
            False,
            "the server does not accept this",
        ),
        (KEYS.worker, True, "has only one side --plain?"),
    ],
)
def test_a_worker_with_a_wrong_key_is_told_so(served: Served, key: WorkerKey, plain: bool, words: str) -> None:
    with closing(WorkerLink([served.link.address], key, MOST, plain=plain)) as worker:
        worker.send("hello", {})
        until(lambda: worker.receive(0.1) is None and words in worker.trouble())
