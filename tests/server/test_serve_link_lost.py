"""Links whose other side is killed, stopped, started again, or cannot be reached: real sockets and processes."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from contextlib import ExitStack, closing

import numpy
from linking import KEYS, MOST, a_server, a_worker, one_message, until, worker_process

from free_ports import free_port
from jobs import HANG_SECONDS
from mpitrain.server.server_link import Disconnected, Event
from mpitrain.server.wire import Message
from mpitrain.server.worker_link import WorkerLink


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
        send = threading.Thread(target=worker.send, args=("hello", {}))
        send.start()
        peer = one_message(server).peer
        send.join()
        worker.send("done", {}, [numpy.zeros(MOST, numpy.uint8)])
        time.sleep(1.5 * silence)
        message = one_message(server)
        assert (message.peer, message.kind) == (peer, "done")


def test_a_server_that_is_started_again() -> None:
    server = a_server()
    with ExitStack() as stack:
        worker = stack.enter_context(closing(a_worker(server)))
        send = threading.Thread(target=worker.send, args=("hello", {}))
        send.start()
        before = one_message(server).peer
        send.join()
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
        send = threading.Thread(target=worker.send, args=("hello", {}))
        send.start()
        one_message(server)
        send.join()
        assert worker.trouble() == f"the server at {server.address} is there, and does not answer"


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
