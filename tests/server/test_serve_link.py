"""Links of a server and its workers, over real sockets: also killed, stopped, started again, out of reach."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import zmq

from free_ports import free_port
from jobs import HANG_SECONDS, clean_environment
from mpitrain.errors import ConfigError, WireError
from mpitrain.role import Role
from mpitrain.server.participant import connected
from mpitrain.server.security import ServerKeys, WorkerKey, check_way, make_keys
from mpitrain.server.server_link import Disconnected, Event, ServerLink
from mpitrain.server.wire import CHUNK_BYTES, Message, Peer
from mpitrain.server.worker_link import WorkerLink, parse_address

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


@pytest.mark.parametrize("plain", ["", "lo"])
def test_both_ways(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on the wall that jumps does not matter: nobody looks at it."""
    monkeypatch.setattr(time, "time", lambda: pytest.fail("the clock was read"))
    with closing(a_server(plain=plain)) as server, closing(a_worker(server, plain=bool(plain))) as worker:
        values = numpy.random.default_rng(0).random(3 * CHUNK_BYTES // 8 + 1)
        send = threading.Thread(target=worker.send, args=("done", {"unit": 7}, [values, values[:0]]))
        send.start()  # the server has to look while the worker waits to come in
        message = one_message(server)
        send.join()
        assert (message.kind, message.fields) == ("done", {"unit": 7})
        assert (message.arrays[0] == values).all()
        server.send(message.peer, "unit", {"number": 8}, [values[::-1]])
        back = reply(server, worker)
        assert (back.kind, back.peer, back.fields) == ("unit", b"", {"number": 8})
        assert (back.arrays[0] == values[::-1]).all()
        assert server.refused == 0


def test_without_encryption_no_address_of_a_name_may_lead_over_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may lead to this machine and elsewhere, and to other addresses later; a link tries all of them."""
    real, name, port = socket.getaddrinfo, "tunnel.example", free_port()
    ips = ["127.0.0.1", "198.51.100.7"]

    def resolve(host: str, *rest: Any, **named: Any) -> Any:
        return [one for ip in (ips if host == name else [host]) for one in real(ip, *rest, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    # Whatever this machine has is a network that others can read.
    monkeypatch.setattr("mpitrain.server.security._TUNNEL", -1)
    with pytest.raises(ConfigError, match=r"not a tunnel|no route to|is not known"):
        check_way(name)
    with closing(WorkerLink([f"{name}:{port}"], KEYS.worker, MOST, plain=True)) as worker:
        assert worker._socket.getsockopt(zmq.BINDTODEVICE).rstrip(b"\0") == b"lo"
        del ips[0]
        monkeypatch.setattr("mpitrain.server.worker_link.way_to", refuse)
        deadline = time.monotonic() + HANG_SECONDS
        with pytest.raises(ConfigError, match=re.escape("198.51.100.7 is read by others")):
            while time.monotonic() < deadline:
                worker.receive(1.0)


def refuse(ip: str) -> str:
    """As way_to, where the way is a card. This machine may have none."""
    raise ConfigError(f"{ip} is read by others")


TO_ITSELF = """
from contextlib import closing
from mpitrain.server.security import make_keys
from mpitrain.server.server_link import ServerLink
from mpitrain.server.security import way_to
from mpitrain.server.worker_link import WorkerLink

keys = make_keys()
print(way_to("10.9.9.1"), way_to("10.8.8.1"), way_to("127.0.0.1"))
with closing(ServerLink("10.9.9.1:*", keys, 1000, plain="tun7")) as server:
    with closing(WorkerLink([server.address], keys.worker, 1000, plain=True)) as worker:
        for _ in range(300):
            worker.receive(0.1)
            server.receive(0.0)
            if worker.is_connected:
                break
        print(worker.is_connected or worker.trouble())
"""

OWN_NETWORK = """
mount -t sysfs none /sys && ip link set lo up || exit 1
ip tuntap add dev tun7 mode tun && ip address add 10.9.9.1/24 dev tun7 && ip link set tun7 up || exit 1
ip link add card7 type veth peer name far7 && ip address add 10.8.8.1/24 dev card7 && ip link set card7 up || exit 1
exec "$@"
"""


def test_a_tunnel_reaches_the_server_of_its_own_machine() -> None:
    """As a further server, or a worker beside the server. An own address of a card leads to this machine alone."""
    in_network = ["unshare", "--net", "--mount", "sh", "-c", OWN_NETWORK, "sh"]
    try:
        subprocess.run([*in_network, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network of its own can be made here, or no tun in it")
    done = subprocess.run([*in_network, sys.executable, "-c", TO_ITSELF], check=False, capture_output=True, text=True)
    assert done.stdout == "tun7 lo lo\nTrue\n", done.stdout + done.stderr


def test_links_are_closed_if_a_further_one_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker connects to the servers whose ports the first one has told."""
    closed: list[str] = []
    close = WorkerLink.close
    monkeypatch.setattr(WorkerLink, "close", lambda link: (closed.append(link.name), close(link)))
    (tmp_path / "key").write_text(KEYS.worker.text)
    first, others = connected(Role("worker", (f"127.0.0.1:{free_port()}",), str(tmp_path / "key")), None, MOST)
    with closing(first):
        ports = [free_port(), free_port(), 70000]
        with pytest.raises(ConfigError, match="70000"):
            others(ports)
        assert closed == [f"server {number} at 127.0.0.1:{ports[number - 1]}" for number in (2, 1)]


def test_what_was_sent_before_the_end_is_delivered() -> None:
    with closing(a_server()) as server:
        worker = a_worker(server)
        thread = threading.Thread(target=lambda: (worker.send("bye", {}, [numpy.ones(MOST // 8)]), worker.close()))
        thread.start()
        first, second = until(server, lambda events: len(events) == 2)
        thread.join()
        assert isinstance(first, Message)
        assert first.kind == "bye"
        assert second == Disconnected(first.peer, "its connection has ended")
        server.send(first.peer, "unit", {})  # nobody is there, and nothing happens
        assert server.receive(0.2) == []


def test_a_port_in_use() -> None:
    with closing(a_server()) as server:
        port = server.address.split(":")[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use on this machine.*--port PORT.*ss -ltnp"):
            a_server(address=server.address)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this machine; `ip -brief address`"):
        a_server(address="192.0.2.1:5000")


@pytest.mark.parametrize(
    "address", ["", "lab1", "lab1:", ":5000", "lab1:0", "lab1:70000", "a b:1", "::1:5000", "lab1:5e3"]
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT, such as lab1:5000"):
        parse_address(address)
    assert parse_address("[::1]:5000") == ("::1", 5000)
    assert parse_address("lab1:5000") == ("lab1", 5000)


def test_a_message_of_the_server_that_cannot_be_read() -> None:
    """Both sides must have the same sizes; a worker says what it does not take."""
    with closing(a_server()) as server, closing(WorkerLink([server.address], KEYS.worker, 100)) as worker:
        peer = greeted(server, worker)
        server.send(peer, "unit", {}, [numpy.zeros(1000)])
        with pytest.raises(WireError, match=r"allowed are|each length is"):
            reply(server, worker)


def test_nothing_of_zeromq_stays() -> None:
    """Threads and descriptors of a link end with it."""
    threads, files = _own("task"), _own("fd")
    with closing(a_server()) as server, closing(a_worker(server)):
        assert server.receive(0.1) == []
    deadline = time.monotonic() + HANG_SECONDS
    while not _own("task") <= threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(_own("fd")) == len(files)


def _own(kind: str) -> set[str]:
    """What this process has, by number: threads ("task") or descriptors ("fd")."""
    return set(os.listdir(f"/proc/self/{kind}"))  # noqa: PTH208 - names are wanted


def test_a_killed_worker_is_seen_at_once() -> None:
    with closing(a_server(silence=1000.0)) as server, worker_process(server, 1000.0) as process:
        peer = one_message(server).peer
        process.kill()
        # Not by silence: that would take longer than `until` waits.
        assert until(server, bool) == [Disconnected(peer, "its connection has ended")]


def test_a_stopped_worker_is_seen_by_its_silence_and_comes_back() -> None:
    silence = 5.0  # a process may get no processor for some seconds
    with closing(a_server(silence=silence)) as server, worker_process(server, silence) as process:
        peer = one_message(server).peer
        assert server.receive(1.5 * silence) == []  # a worker that only waits is not silent
        process.send_signal(signal.SIGSTOP)
        assert until(server, bool) == [Disconnected(peer, "its connection has ended")]
        process.send_signal(signal.SIGCONT)
        assert process.poll() is None


def test_a_server_that_computes_for_long_loses_no_worker() -> None:
    """Nobody reads meanwhile: a message waits in the sockets, and signs of life come behind it."""
    with ExitStack() as stack:
        silence = 5.0
        server = stack.enter_context(closing(a_server(silence=silence)))
        worker = stack.enter_context(closing(WorkerLink([server.address], KEYS.worker, MOST, silence_seconds=silence)))
        peer = greeted(server, worker)
        worker.send("done", {}, [numpy.zeros(MOST, numpy.uint8)])
        time.sleep(1.5 * silence)
        message = one_message(server)
        assert (message.peer, message.kind) == (peer, "done")


def test_a_server_that_is_started_again() -> None:
    server = a_server()
    with ExitStack() as stack:
        worker = stack.enter_context(closing(a_worker(server)))
        before = greeted(server, worker)
        server.close()
        worker.send("next", {})  # dropped: it would come too late
        again = stack.enter_context(closing(a_server(address=server.address)))
        deadline = time.monotonic() + HANG_SECONDS
        events: list[Event] = []
        while not events:
            assert time.monotonic() < deadline
            asking = threading.Thread(target=worker.send, args=("hello again", {}))
            asking.start()
            while asking.is_alive():
                events += again.receive(0.05)
            asking.join()
            events += again.receive(0.05)
        assert {event.kind for event in events if isinstance(event, Message)} == {"hello again"}
        assert before not in {event.peer for event in events}


def test_the_server_is_looked_for_at_several_addresses() -> None:
    with closing(a_server()) as server, socket.create_server(("127.0.0.1", 0)) as silent:
        nobody, free = silent.getsockname()[1], free_port()
        addresses = [f"127.0.0.1:{free}", f"127.0.0.1:{nobody}", f"localhost:{server.address.split(':')[1]}"]
        with closing(WorkerLink(addresses, KEYS.worker, MOST)) as worker:
            stop = threading.Event()

            def ask() -> None:
                while not stop.is_set():
                    worker.send("hello", {})

            asking = threading.Thread(target=ask)
            asking.start()
            message = one_message(server)
            stop.set()
            asking.join()
            assert message.kind == "hello"
            assert worker.address == addresses[2]


def test_why_nothing_comes() -> None:
    with closing(WorkerLink([f"127.0.0.1:{free_port()}"], KEYS.worker, MOST)) as worker:
        assert worker.receive(0.1) is None
        assert "no program listens at 127.0.0.1:" in worker.trouble()
    with closing(WorkerLink(["nowhere.invalid:5000"], KEYS.worker, MOST)) as worker:
        worker.send("hello", {})
        assert worker.receive(0.1) is None
        assert worker.trouble() == "the name nowhere.invalid cannot be resolved"
    with closing(a_server()) as server, closing(a_worker(server)) as worker:
        greeted(server, worker)
        assert worker.trouble() == f"the server at {server.address} is running, but does not answer"


def test_a_machine_that_drops_packets() -> None:
    """As behind a firewall: nothing comes back, because the queue of connections is full and the kernel drops more."""
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = f"127.0.0.1:{full.getsockname()[1]}"
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        worker = stack.enter_context(closing(WorkerLink([address], KEYS.worker, MOST)))
        assert worker.receive(0.1) is None
        assert re.match(
            f"nothing answers at {address}: the machine is off, or a firewall drops .*sudo ufw allow", worker.trouble()
        )
