"""Servers and workers in simulated time: the messages of mpitrain/server, and its queue and modes themselves.

    worker             first server              another server
      done, gradient ─────>│<────────────── have ───── │
      <───── unit, parameters                           │
      pull ──────────────────────────────────────────> │
      <──────────────────────────────────── parameters │
      (computes)
      push ──────────────────────────────────────────> │
      done, gradient ─────>│

Every server has an equal part of the parameters. The connections of a process share its link: each has one chunk of a
message on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from mpitrain.errors import ConfigError
from mpitrain.forecast.events import Events, Network, Pending, SimulatedRank
from mpitrain.forecast.machines import Machines
from mpitrain.server.wire import CHUNK_BYTES
from mpitrain.server.work_units import Asynchronous, BoundedStaleness, ConsistencyMode, Synchronous, WorkQueue, WorkUnit
from mpitrain.world.shard import part_of

MODES = ("sync", "bounded", "async")
_SMALL_BYTES = 256  # a message without arrays, with its frame and what encryption adds
_ASK, _UNIT, _PULL, _PARAMETERS, _PUSH, _HAVE = range(6)


@dataclass(frozen=True)
class SimulatedServing:
    """A work unit of a worker.

    Attributes:
        num_parameters: float32. A worker pulls all of them, and pushes as many gradients, for each unit.
        compute_seconds: of one unit, on a node of speed 1.
        num_samples: of one unit.
        mode: one of MODES.
        spread: standard deviation of the logarithm of the time of a computation, whose mean stays.
        staleness: in mode bounded, a worker waits while it is more than this many units ahead of the slowest one.
    """

    num_parameters: int
    compute_seconds: float
    num_samples: int
    mode: str = "async"
    spread: float = 0.0
    staleness: int = 4


def simulate_serving(
    machines: Machines, num_servers: int, num_workers: int, serving: SimulatedServing, num_rounds: int, seed: int = 0
) -> tuple[float, str, float]:
    """Simulate some units of each worker. Servers are the first ranks.

    The first unit of each worker is not counted, because all begin at the same time.

    Args:
        num_rounds: units of each worker that are counted, on average.

    Returns:
        Samples/s; the name of the link that was busiest; the share of the time in which it was busy.

    Raises:
        ConfigError: there are more servers than ranks, or no room for all.
    """
    check_serving(machines, num_servers, num_workers, serving.mode)
    simulation = _Serving(machines, num_servers, num_workers, serving, numpy.random.default_rng([seed, num_workers]))
    return simulation.run(num_workers * num_rounds)


def check_serving(machines: Machines, num_servers: int, num_workers: int, mode: str) -> None:
    """Raise ConfigError if these servers and workers cannot be simulated there."""
    if mode not in MODES:
        raise ConfigError(f"there is no mode {mode!r} in simulations; known: {', '.join(MODES)}")
    if num_servers + num_workers > machines.num_ranks:
        raise ConfigError(
            f"{num_servers} servers and {num_workers} workers are {num_servers + num_workers} ranks; "
            f"{machines.origin} has room for {machines.num_ranks}. Take fewer"
        )


class _Connections:
    """What one process sends. Each connection has one piece on its way, so they share the link evenly."""

    def __init__(self, events: Events, rank: SimulatedRank) -> None:
        self._events, self._rank = events, rank
        self._queues: dict[int, deque[tuple[int, int]]] = {}
        self._flying: dict[int, Pending] = {}

    def send(self, target: int, tag: int, num_bytes: int) -> None:
        """Begin to send a message: a small part, then the arrays."""
        queue = self._queues.setdefault(target, deque())
        queue.append((tag, _SMALL_BYTES))
        queue.extend((tag, piece) for piece in _pieces(num_bytes))
        self.drive()

    def drive(self) -> None:
        """Continue sending."""
        for target, queue in tuple(self._queues.items()):
            flying = self._flying.get(target)
            if flying is None or flying.Test():
                if queue:
                    self._flying[target] = self._events.send(self._rank, target, *queue.popleft())
                else:
                    del self._queues[target]

    @property
    def is_idle(self) -> bool:
        """True if all has left."""
        return not self._queues

    def expect(self, source: int, tag: int, num_bytes: int) -> Pending:
        """Receive a message. The request is done when the last of it is there."""
        small = self._events.receive(self._rank, source, tag, _SMALL_BYTES)
        return [small, *self.expect_arrays(source, tag, num_bytes)][-1]

    def expect_arrays(self, source: int, tag: int, num_bytes: int) -> list[Pending]:
        """Receive the arrays of a message, whose small part was received before."""
        return [self._events.receive(self._rank, source, tag, piece) for piece in _pieces(num_bytes)][-1:]


class _Serving:
    """Servers, and then workers, as ranks."""

    def __init__(
        self,
        machines: Machines,
        num_servers: int,
        num_workers: int,
        serving: SimulatedServing,
        random: numpy.random.Generator,
    ) -> None:
        node_of = machines.nodes_of(num_servers + num_workers)
        self._network = Network(machines, node_of)
        self._events = Events(self._network, len(node_of))
        self._serving, self._random = serving, random
        self._seconds = [serving.compute_seconds / machines.speeds[node] for node in node_of]
        self._add_bytes_per_second = machines.costs.add_bytes_per_second
        self._servers, self._workers = range(num_servers), range(num_servers, len(node_of))
        parts = (part_of(serving.num_parameters, server, num_servers) for server in self._servers)
        self._part_bytes = [(part.stop - part.start) * 4 for part in parts]
        # An epoch without end, so that no unit is cut short.
        self._queue = WorkQueue(2**62)
        self._mode = self._make_mode()
        self._told: set[int] = set()  # the workers that were told that the run is over
        self._answered: list[float] = []  # when each unit was used

    def run(self, num_units: int) -> tuple[float, str, float]:
        """See simulate_serving."""
        first = len(self._workers)
        work: list[Iterator[object]] = [self._first_server(first + num_units)]
        work += [self._other_server(server) for server in self._servers[1:]]
        work += [self._worker(worker) for worker in self._workers]
        self._events.run(work)
        begin, end = self._answered[first - 1], self._answered[first + num_units - 1]
        link = max(self._network.links, key=lambda one: one.busy_seconds)
        return num_units * self._serving.num_samples / (end - begin), link.name, link.busy_seconds / self._events.now

    def _make_mode(self) -> ConsistencyMode:
        serving = self._serving
        if serving.mode == "sync":
            return Synchronous(self._queue, len(self._workers) * serving.num_samples, None, 0)
        if serving.mode == "bounded":
            return BoundedStaleness(self._queue, serving.num_samples, serving.staleness)
        return Asynchronous(self._queue, serving.num_samples)

    def _first_server(self, num_units: int) -> Iterator[object]:
        rank = self._events.ranks[0]
        connections = _Connections(self._events, rank)
        asks = {worker: connections.expect(worker, _ASK, 0) for worker in self._workers}
        haves = {
            (server, worker): connections.expect(server, _HAVE + worker, 0)
            for server in self._servers[1:]
            for worker in self._workers
        }
        parts = dict.fromkeys(self._workers, 0)  # that have come of the answer of each worker
        units: dict[int, WorkUnit] = {}
        waiting: list[int] = []
        for worker in self._workers:
            self._mode.join(worker)
        while True:
            for worker in [worker for worker, ask in asks.items() if ask.Test()]:
                asks[worker] = connections.expect(worker, _ASK, self._part_bytes[0])
                waiting.append(worker)
                parts[worker] += worker in units
            for server, worker in [pair for pair, have in haves.items() if have.Test()]:
                haves[server, worker] = connections.expect(server, _HAVE + worker, 0)
                parts[worker] += 1
            for worker in [worker for worker in waiting if parts[worker] == len(self._servers)]:
                parts[worker] = 0
                self._take(units.pop(worker), rank)
            for worker in [worker for worker in waiting if worker not in units]:
                if len(self._answered) >= num_units:
                    waiting.remove(worker)
                    self._told.add(worker)
                    connections.send(worker, _UNIT, 0)
                elif (unit := self._mode.next_unit(worker)) is not None:
                    waiting.remove(worker)
                    units[worker] = unit
                    connections.send(worker, _UNIT, self._part_bytes[0])
            connections.drive()
            if len(self._told) == len(self._workers) and connections.is_idle:
                return
            yield None

    def _take(self, unit: WorkUnit, rank: SimulatedRank) -> None:
        """Take in an answer, and make the update if it is due: one pass over the gradients of each unit."""
        answered = self._queue.answer(unit.number, unit.worker)
        assert answered is not None
        used = self._mode.answer(answered) or ()
        for one in used:
            self._queue.use(one.number)
            rank.clock += self._part_bytes[0] / self._add_bytes_per_second
        self._answered += [rank.clock] * len(used)

    def _other_server(self, server: int) -> Iterator[object]:
        rank, part_bytes = self._events.ranks[server], self._part_bytes[server]
        connections = _Connections(self._events, rank)
        pulls = {worker: connections.expect(worker, _PULL, 0) for worker in self._workers}
        pushes = {worker: connections.expect(worker, _PUSH, part_bytes) for worker in self._workers}
        while True:
            for worker in [worker for worker, pull in pulls.items() if pull.Test()]:
                if worker in self._told:  # it disconnects
                    del pulls[worker]
                    continue
                pulls[worker] = connections.expect(worker, _PULL, 0)
                connections.send(worker, _PARAMETERS, part_bytes)
            for worker in [worker for worker, push in pushes.items() if push.Test()]:
                pushes[worker] = connections.expect(worker, _PUSH, part_bytes)
                rank.clock += part_bytes / self._add_bytes_per_second
                connections.send(0, _HAVE + worker, 0)
            connections.drive()
            if not pulls and connections.is_idle:
                return
            yield None

    def _worker(self, worker: int) -> Iterator[object]:
        rank = self._events.ranks[worker]
        connections = _Connections(self._events, rank)

        def wait(*requests: Pending) -> Iterator[object]:
            while not all(request.Test() for request in requests):
                connections.drive()
                yield None
            connections.drive()

        connections.send(0, _ASK, 0)
        while True:
            yield from wait(connections.expect(0, _UNIT, 0))
            if worker in self._told:
                break
            yield from wait(*connections.expect_arrays(0, _UNIT, self._part_bytes[0]))
            for server in self._servers[1:]:
                connections.send(server, _PULL, 0)
            yield from wait(
                *(connections.expect(server, _PARAMETERS, self._part_bytes[server]) for server in self._servers[1:])
            )
            yield from wait(self._events.until(rank, rank.clock + self._seconds[worker] * self._factor()))
            for server in self._servers[1:]:
                connections.send(server, _PUSH, self._part_bytes[server])
            connections.send(0, _ASK, self._part_bytes[0])
        for server in self._servers[1:]:
            connections.send(server, _PULL, 0)
        while not connections.is_idle:
            yield None
            connections.drive()

    def _factor(self) -> float:
        spread = self._serving.spread
        return float(self._random.lognormal(-(spread**2) / 2, spread)) if spread else 1.0


def _pieces(num_bytes: int) -> list[int]:
    return [min(CHUNK_BYTES, num_bytes - begin) for begin in range(0, num_bytes, CHUNK_BYTES)]
