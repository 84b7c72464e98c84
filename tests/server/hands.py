"""A worker that speaks the protocol by hand, and a server in a thread for it, or several."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy
from counting import NUM_SAMPLES, WorkerThreads, counting, parts, playing, worker_key

import mpitrain as mt
from free_ports import free_addresses
from jobs import HANG_SECONDS, until
from mpitrain.server.parameters import Replica
from mpitrain.server.security import make_keys
from mpitrain.server.server_link import ServerLink
from mpitrain.server.wire import Message
from mpitrain.server.worker import ShardLinks
from mpitrain.server.worker_link import Patience, WorkerLink


class Hand:
    """A worker by hand."""

    def __init__(self, address: str, facts: Any, host: str = "hand") -> None:
        self._link = WorkerLink([address], worker_key(), 10**6)
        self.life = self.ticket = ""
        self.facts, self.host = facts, host
        self.has_ended = False

    def say(self, kind: str, *arrays: numpy.ndarray, **fields: Any) -> None:
        self.has_ended |= kind == "bye"
        self._link.send(kind, {"life": self.life, **fields}, arrays)

    def hear(self, kind: str) -> Message:
        while True:
            message = self._link.receive(60)
            assert message is not None, f"no {kind}"
            if message.kind != "welcome":  # it may have greeted twice
                assert message.kind == kind, message
                self.has_ended |= kind == "refused"
                return message

    def greet(self) -> Message:
        """What is said before the connection is there is lost."""
        while True:
            self.say("hello", host=self.host, facts=self.facts)
            if (message := self._link.receive(0.5)) is not None:
                return message

    def join(self) -> None:
        message = self.greet()
        assert message.kind == "welcome"
        self.life, self.ticket = message.fields["life"], message.fields["ticket"]

    def pull(self, version: int = -1) -> Message:
        self.say("next", version=version)
        return self.hear("unit")

    def push(self, job: Message, gradient: numpy.ndarray, **fields: Any) -> None:
        known = {"number": job.fields["number"], "version": job.fields["version"], "loss": 1.0, "scale": 1.0}
        self.say("done", gradient, **{**known, "unused": [], "note": None, **fields})

    def end(self) -> None:
        """Hear that the run is over, and end."""
        while (message := self._link.receive(60)) is not None and message.kind != "over":
            pass
        assert message is not None, "no over"
        self.say("bye")

    def close(self) -> None:
        self._link.close()


class Served:
    """A server in a thread."""

    def __init__(
        self,
        steps: int,
        strategy: mt.ParameterServer,
        build: Any = parts,
        hang_seconds: float = 0,
        hooks: Sequence[mt.Hook] = (),
        num_servers: int = 1,
    ) -> None:
        self.addresses = free_addresses(num_servers)
        self.address = self.addresses[0]
        builds = [build(deepcopy(strategy)) for _ in self.addresses[1:]]
        self.error: BaseException | None = None
        world = mt.init()
        world = world.replaced(config=replace(world.config, hang_seconds=hang_seconds))
        with playing("server", self.address, num_servers=num_servers):
            self.trainer = mt.Trainer(build(strategy), [mt.StopAtStep(steps), *hooks], world)

        self.strategy = strategy
        self.facts = strategy._participant.facts(self.trainer.data)  # type: ignore[arg-type]
        self._others = WorkerThreads()
        self._others.start_shards(self.addresses, builds)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.trainer.run()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._others.end()
        if self.error is not None:
            raise self.error

    @property
    def counts(self) -> numpy.ndarray:
        return numpy.array(self.trainer.adapter.parameters()["count"])


@contextmanager
def hands(served: Served, number: int) -> Iterator[list[Hand]]:
    workers = [Hand(served.address, served.facts) for _ in range(number)]
    try:
        for worker in workers:
            worker.join()
        yield workers
    finally:
        for worker in workers:
            worker.close()


@contextmanager
def trained(served: Served, number: int, counts: float | None = None) -> Iterator[list[Hand]]:
    """Workers that hear of the end of the run after this, unless they have left it. All parameters have this value."""
    with hands(served, number) as workers:
        yield workers
        for worker in workers:
            if not worker.has_ended:
                worker.end()
    served.end()
    assert counts is None or set(served.counts) == {counts}


def mean(job: Message, value: float = 1.0) -> numpy.ndarray:
    return numpy.full(NUM_SAMPLES, -value)


@contextmanager
def lines_of(worker: Hand, served: Served) -> Iterator[list[WorkerLink]]:
    links = [WorkerLink([address], worker_key(), 10**6) for address in served.addresses[1:]]
    try:
        yield links
    finally:
        for link in links:
            link.close()


def say(link: WorkerLink, kind: str, arrays: Sequence[numpy.ndarray] = (), **fields: Any) -> None:
    """Send, as soon as there is a connection."""
    until(lambda: link.receive(0.05) or link.is_connected)
    link.send(kind, fields, arrays)


def of(worker: Hand, job: Message) -> dict[str, Any]:
    """What shows a further server that a worker has a job."""
    return {"life": worker.life, "ticket": worker.ticket, **{name: job.fields[name] for name in ("number", "token")}}


def push_both(worker: Hand, line: WorkerLink, job: Message, value: float = 1.0) -> None:
    """Push to two servers, first to the further one."""
    say(line, "push", [mean(job, value)[:12]], **of(worker, job))
    worker.push(job, mean(job, value)[:12])


def train_once(served: Served) -> None:
    """A run of one step with two servers is made by one worker: nothing that came before has counted."""
    with trained(served, 1, 1.0) as (worker,), lines_of(worker, served) as (line,):
        push_both(worker, line, worker.pull())


def hear(link: WorkerLink, kind: str) -> Message:
    message = link.receive(60)
    assert message is not None
    assert message.kind == kind
    return message


@contextmanager
def two_lines(
    address: str, key: Any, num_values: int = NUM_SAMPLES, now: Callable[[], float] = time.monotonic
) -> Iterator[tuple[ShardLinks, Replica, ExitStack]]:
    """What a worker has for a second server at this address; and what closes the first server, which is there."""
    adapter = mt.ArrayFunction(counting, {"count": numpy.zeros(num_values)}, mt.optim.SGD(1.0))
    replica = Replica(adapter, 2)
    link = WorkerLink([address], key, 8 * num_values)
    keys = make_keys()
    with ExitStack() as stack:
        server = stack.enter_context(closing(ServerLink("127.0.0.1:*", keys, 10**6)))
        with closing(WorkerLink([server.address], keys.worker, 10**6)) as first:
            until(lambda: first.receive(0.05) or first.is_connected or server.receive(0.05))
            lines = ShardLinks(
                first, [link], replica, Patience(stall_seconds=600.0, hang_seconds=300.0, say=print, now=now)
            )
            with closing(lines):
                yield lines, replica, stack


def next_message(link: ServerLink) -> Message:
    while True:
        events = link.receive(HANG_SECONDS)
        assert events, "nothing came"
        for event in events:
            if isinstance(event, Message):
                return event


def in_thread(call: Callable[..., object], *arguments: Any) -> tuple[threading.Thread, list[BaseException]]:
    """Call this in a thread, and keep what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call(*arguments)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


class MovedClock:
    """A clock that a test moves on by 200 s with each frame of a message that has been heard of."""

    def __init__(self) -> None:
        self.passed, self.looks = 0.0, 0

    def __call__(self) -> float:
        self.looks += 1
        return time.monotonic() + self.passed

    def send(self, link: ServerLink, peer: Any, message: Iterable[Any], hears: WorkerLink, errors: list[Any]) -> None:
        """Send a message of four frames, and wait after each until who hears it has looked at the clock."""
        *parts, last = message
        assert len(parts) == 3
        for number, frame in enumerate(parts, 1):
            link._socket.send_multipart([peer, frame])
            until(lambda number=number: errors or hears.frames == number)
            self.passed += 200.0
            before = self.looks
            until(lambda before=before: errors or self.looks > before + 1)
        link._socket.send_multipart([peer, last])
