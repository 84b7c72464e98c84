"""For how long a worker waits for its server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy
import pytest
from counting import NUM_SAMPLES, counting
from hands import in_thread

import mpitrain as mt
from free_ports import free_address
from jobs import HANG_SECONDS
from mpitrain.server.security import WorkerKey, keys_of
from mpitrain.server.server_link import ServerLink
from mpitrain.server.wire import Message
from mpitrain.server.worker import GradientWorker
from mpitrain.server.worker_link import Patience, WorkerLink


def hear(link: ServerLink, kind: str) -> Message:
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        for event in link.receive(0.5):
            if isinstance(event, Message) and event.kind == kind:
                return event
    raise AssertionError(f"no {kind}")


def worker_with(link: WorkerLink, adapter: Any, data: Any, now: Callable[[], float] = time.monotonic) -> GradientWorker:
    patience = Patience(stall_seconds=600.0, hang_seconds=300.0, say=print, now=now)
    return GradientWorker(link, lambda _: [], adapter, data, None, {"host": "here"}, patience)


def test_the_time_of_a_job_is_no_silence_of_the_server(tmp_path: Any) -> None:
    """The server ends while the worker computes for longer than it waits for a server. It waits for the next one."""
    passed = [0.0]
    keys, address = keys_of(tmp_path / "server"), free_address()
    computes, goes_on = threading.Event(), threading.Event()

    def slow(parameters: Any, batch: Any, on_gradient: Any) -> float:
        computes.set()
        assert goes_on.wait(HANG_SECONDS)
        passed[0] += 1000.0
        return counting(parameters, batch, on_gradient)

    world = mt.init()
    adapter = mt.ArrayFunction(slow, {"count": numpy.zeros(NUM_SAMPLES)}, mt.optim.SGD(1.0))
    data = mt.data.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=8)

    def work() -> None:
        with closing(WorkerLink([address], keys.worker, 10**6)) as link:
            worker_with(link, adapter, data, lambda: time.monotonic() + passed[0]).work()

    thread, errors = in_thread(work)
    with closing(ServerLink(address, keys, 10**6)) as link:
        peer = hear(link, "hello").peer
        link.send(peer, "welcome", {"life": "first", "name": "a worker", "ticket": "t", "ports": []})
        hear(link, "next")
        values = [numpy.zeros(NUM_SAMPLES)]
        runs = {"float64": [[0, NUM_SAMPLES]]}
        job = {"number": 1, "epoch": 0, "begin": 0, "end": 8, "version": 0, "runs": runs, "loss_scale": None}
        link.send(peer, "unit", job, values)
        assert computes.wait(HANG_SECONDS)
    goes_on.set()
    with closing(ServerLink(address, keys, 10**6)) as link:
        link.send(hear(link, "next").peer, "over", {})
        hear(link, "bye")
    thread.join(HANG_SECONDS)
    assert errors == []


def at_work(address: str, key: WorkerKey) -> threading.Thread:
    """A worker in a thread, which ends when the server says that the run is over."""
    adapter = mt.ArrayFunction(counting, {"count": numpy.zeros(NUM_SAMPLES)}, mt.optim.SGD(1.0))
    data = mt.data.ArrayData(mt.init(), numpy.arange(NUM_SAMPLES), global_batch=8)

    def work() -> None:
        with closing(WorkerLink([address], key, 10**6)) as link:
            worker_with(link, adapter, data).work()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_questions_that_a_server_does_not_read_become_rare(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """As during a long hook. When too many wait, ZeroMQ reads no signs of life either, and ends the connection."""
    monkeypatch.setattr("mpitrain.server.worker._REPEAT_SECONDS", 0.01)
    monkeypatch.setattr("mpitrain.server.worker._LOOK_SECONDS", 0.005)
    keys, address = keys_of(tmp_path / "server"), free_address()
    thread = at_work(address, keys.worker)
    with closing(ServerLink(address, keys, 10**6)) as link:
        peer = hear(link, "hello").peer
        link.send(peer, "welcome", {"life": "first", "name": "a worker", "ticket": "t", "ports": []})
        hear(link, "next")
        time.sleep(1.5)
        questions = []
        while events := link.receive(0.0):
            questions += events
        assert 1 <= len(questions) < 16  # 150 if they did not become rare
        link.send(peer, "over", {})
        hear(link, "bye")
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_on_another_connection_a_worker_asks_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("mpitrain.server.worker._REPEAT_SECONDS", 1000.0)
    keys, address = keys_of(tmp_path / "server"), free_address()
    thread = at_work(address, keys.worker)
    for kind in ("hello", "next"):  # the first question came to a server that has ended since
        with closing(ServerLink(address, keys, 10**6)) as link:
            peer = hear(link, kind).peer
            if kind == "hello":
                link.send(peer, "welcome", {"life": "first", "name": "a worker", "ticket": "t", "ports": []})
                hear(link, "next")
            else:
                link.send(peer, "over", {})
                hear(link, "bye")
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()
