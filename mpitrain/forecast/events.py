"""Simulated time: links that carry messages, and the events that resume the ranks.

A link serves one message at a time, in the order in which messages reach it.

    rank --> [link of its node, out] --latency--> ( [uplink of its rack] --> [downlink of the other rack] )
         --> [link of the other node, in] --> rank

A message is cut through: it continues as soon as its first byte is there, and ends on a link no earlier than its last
byte has come. A message of n bytes over idle links of equal rate B with latency L takes L + n / B, the model of Hockney
(Hockney, The communication challenge for MPP, Parallel Computing 20 (1994) 389-398). Messages that share a link wait
for each other, as the gap per byte of LogGP makes them wait (Alexandrov, Ionescu, Schauser and Scheiman, LogGP, SPAA
1995).

Events come in the order of their times. A rank is a generator, such as the steps of an allreduce: it makes all possible
progress, and yields while it must wait. `Pending.Test`, MPI's way to ask whether a message is complete, compares the
time of completion with the clock of the rank. A rank that has yielded is resumed when the next of its messages is
complete.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from mpitrain.errors import MpitrainError
from mpitrain.forecast.machines import Machines


class SimulatedLink:
    """One direction of a link.

    Attributes:
        name: for tables.
        seconds_per_byte: the inverse of its rate.
        free_at: when it has served all messages that have reached it, in seconds.
        busy_seconds: how long it has served messages so far.
    """

    __slots__ = ("busy_seconds", "free_at", "name", "seconds_per_byte")

    def __init__(self, name: str, bytes_per_second: float) -> None:
        self.name = name
        self.seconds_per_byte = 1 / bytes_per_second
        self.free_at = 0.0
        self.busy_seconds = 0.0

    def serve(self, num_bytes: int, now: float) -> float:
        """Serve a message that reaches the link now. Return when its first byte continues."""
        begin = self.free_at if self.free_at > now else now
        seconds = num_bytes * self.seconds_per_byte
        self.free_at = begin + seconds
        self.busy_seconds += seconds
        return begin


class Way:
    """The way of messages from one node to another, or inside a node.

    Attributes:
        links: in the order in which a message passes them; none inside a node.
        latency_seconds: between the first link and the second one, or of the whole way.
        seconds_per_byte: a message takes no less, however fast the links are.
    """

    __slots__ = ("latency_seconds", "links", "seconds_per_byte")

    def __init__(self, links: Sequence[SimulatedLink], latency_seconds: float, seconds_per_byte: float) -> None:
        self.links = tuple(links)
        self.latency_seconds = latency_seconds
        self.seconds_per_byte = seconds_per_byte


class Network:
    """The links of some machines, all idle, and the ways between their ranks."""

    def __init__(self, machines: Machines, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each rank."""
        self._machines = machines
        rates = machines.link_bytes_per_second[: max(node_of) + 1]
        self._out = [SimulatedLink(f"link of node {node}", rate) for node, rate in enumerate(rates)]
        self._in = [SimulatedLink(f"link of node {node}", rate) for node, rate in enumerate(rates)]
        racks = machines.rack_of(len(rates) - 1) + 1 if machines.nodes_per_rack else 0
        uplink = machines.uplink_bytes_per_second
        self._up = [SimulatedLink(f"uplink of rack {rack}", uplink) for rack in range(racks)]
        self._down = [SimulatedLink(f"uplink of rack {rack}", uplink) for rack in range(racks)]
        self._inside = Way((), machines.inside_latency_seconds, 1 / machines.inside_bytes_per_second)
        self._ways: dict[tuple[int, int], Way] = {}
        self._node_of = tuple(node_of)

    @property
    def links(self) -> list[SimulatedLink]:
        """All links."""
        return [*self._out, *self._in, *self._up, *self._down]

    @property
    def to_oneself(self) -> Way:
        """Out of the first node, and into it again."""
        return Way([self._out[0], self._in[0]], self._machines.latency_seconds, 0.0)

    def way(self, source: int, target: int) -> Way:
        """The way between two ranks."""
        pair = self._node_of[source], self._node_of[target]
        way = self._ways.get(pair)
        if way is None:
            way = self._ways[pair] = self._between(*pair)
        return way

    def _between(self, source: int, target: int) -> Way:
        if source == target:
            return self._inside
        links = [self._out[source]]
        here, there = self._machines.rack_of(source), self._machines.rack_of(target)
        if self._up and here != there:
            links += [self._up[here], self._down[there]]
        pair_rate = self._machines.pair_bytes_per_second(source, target)
        seconds_per_byte = 0.0 if math.isinf(pair_rate) else 1 / pair_rate
        return Way([*links, self._in[target]], self._machines.latency_seconds, seconds_per_byte)


_ENDED = object()


class SimulatedRank:
    """One rank.

    Attributes:
        number: the rank.
        clock: its time in seconds. While the rank works, it is ahead of the events.
    """

    __slots__ = ("clock", "number", "posts_at", "resumes_at", "steps")

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock = 0.0
        self.steps: Iterator[object] = iter(())
        self.resumes_at = -1.0  # the latest time for which an event is due that resumes it
        self.posts_at = -1.0  # the latest time for which an event was made that sends a message of it


class Pending:
    """A request: a send or a receive that was posted, or a time that will come."""

    __slots__ = ("done_at", "num_bytes", "rank")

    def __init__(self, rank: SimulatedRank, num_bytes: int = 0, done_at: float = math.inf) -> None:
        self.rank = rank
        self.num_bytes = num_bytes
        self.done_at = done_at

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """As of an MPI.Request."""
        return self.done_at <= self.rank.clock


class _Transit:
    """A message on its way."""

    __slots__ = ("arrives", "next_link", "num_bytes", "receive", "send", "tail_at", "target", "way")

    def __init__(self, send: Pending, target: SimulatedRank, way: Way) -> None:
        self.send = send
        self.num_bytes = send.num_bytes
        self.target = target
        self.way = way
        self.next_link = 0
        self.tail_at = 0.0  # no link ends it earlier
        self.receive: Pending | None = None
        self.arrives = False


class Events:
    """Runs the ranks of a simulation.

    A message is sent at once, whether its receive is posted or not. A send is complete when the last byte has left
    the node.

    If all ranks do the same (Entry.is_alike), one is enough. What it sends to the rank i places after it, the rank i
    places before it sends to it, at the same time over links in the same state.

    Attributes:
        ranks: by number.
        running: the rank whose work continues now.
        now: the time of the last event.
        sent: for each message, in the order of the posts: source, target, tag, bytes. None unless `records`.
    """

    def __init__(self, network: Network, num_ranks: int, *, records: bool = False, num_alike: int = 0) -> None:
        """`num_alike`: the number of ranks that do what the only one does, itself among them; 0: each has its own."""
        self.ranks = [SimulatedRank(number) for number in range(num_ranks)]
        self.sent: list[tuple[int, int, int, int]] | None = [] if records else None
        self.running = self.ranks[0]  # the rank whose work continues now
        self._network = network
        self._num_alike = num_alike
        self._due: list[tuple[float, int, SimulatedRank | _Transit]] = []
        self._number = 0  # events of one time come in the order in which they were made
        self.now = 0.0
        self._sends: defaultdict[tuple[int, int, int], deque[_Transit]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int, int], deque[Pending]] = defaultdict(deque)

    def send(self, rank: SimulatedRank, target: int, tag: int, num_bytes: int) -> Pending:
        """Post a message."""
        if self.sent is not None:
            self.sent.append((rank.number, target, tag, num_bytes))
        send = Pending(rank, num_bytes)
        if self._num_alike:
            transit = _Transit(send, rank, self._network.to_oneself)
            key = -target % self._num_alike, rank.number, tag
        else:
            transit = _Transit(send, self.ranks[target], self._network.way(rank.number, target))
            key = rank.number, target, tag
        waiting = self._receives.get(key)
        if waiting:
            transit.receive = waiting.popleft()
        else:
            self._sends[key].append(transit)
        if rank.clock > self.now or rank.clock == rank.posts_at:  # no message overtakes one that was posted before it
            rank.posts_at = rank.clock
            self._push(rank.clock, transit)
        else:
            self._move(transit)
        return send

    def receive(self, rank: SimulatedRank, source: int, tag: int, num_bytes: int) -> Pending:
        """Post a receive: of the first message from `source` with that tag that no earlier receive takes."""
        receive = Pending(rank, num_bytes)
        key = source, rank.number, tag
        coming = self._sends.get(key)
        if not coming:
            self._receives[key].append(receive)
            return receive
        transit = coming.popleft()
        transit.receive = receive
        if transit.arrives:
            receive.done_at = transit.tail_at
        return receive

    def until(self, rank: SimulatedRank, seconds: float) -> Pending:
        """Return a request that is done at that time."""
        self._resume_at(rank, seconds)
        return Pending(rank, done_at=seconds)

    def run(self, work: Iterable[Iterator[object]]) -> None:
        """Run the work of each rank, in the order of ranks, to its end. It begins at the clock of the rank.

        Raises:
            MpitrainError: ranks wait for messages that no rank sends.
        """
        # Plans and arrays of all ranks are millions of objects without circles. The collector takes a fifth of the time
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self._run(work)
        finally:
            if was_enabled:
                gc.enable()

    def _run(self, work: Iterable[Iterator[object]]) -> None:
        unfinished = set(range(len(self.ranks)))
        self.now = min(rank.clock for rank in self.ranks)
        for rank, steps in zip(self.ranks, work, strict=True):
            rank.steps = steps
            self._resume_at(rank, rank.clock)
        while self._due:
            self.now, _, due = heapq.heappop(self._due)
            if isinstance(due, SimulatedRank):
                self.running = due
                if due.resumes_at == self.now:
                    due.resumes_at = -1.0
            else:
                if not due.arrives:
                    self._move(due)
                    continue
                if due.receive is None:
                    continue
                due.receive.done_at = self.now
                self.running = due.target
            rank = self.running
            if rank.number not in unfinished:
                continue
            if rank.clock > self.now:  # it works until then
                self._resume_at(rank, rank.clock)
                continue
            rank.clock = self.now
            if next(rank.steps, _ENDED) is _ENDED:
                unfinished.remove(rank.number)
        if unfinished:
            raise MpitrainError(
                f"the simulation makes no progress: {len(unfinished)} of {len(self.ranks)} ranks, the first one rank "
                f"{min(unfinished)}, wait for messages that no rank sends"
            )

    def _move(self, transit: _Transit) -> None:
        """Let a message into its next link, or take its time inside a node."""
        way, num_bytes = transit.way, transit.num_bytes
        if not way.links:
            transit.tail_at = transit.send.done_at = self.now + way.latency_seconds + num_bytes * way.seconds_per_byte
            self._resume_at(transit.send.rank, transit.tail_at)
        else:
            link = way.links[transit.next_link]
            head = link.serve(num_bytes, self.now)
            tail = max(link.free_at, transit.tail_at)
            if transit.next_link == 0:
                tail = max(tail, head + num_bytes * way.seconds_per_byte)
                transit.send.done_at = tail
                self._resume_at(transit.send.rank, tail)
                head += way.latency_seconds
                tail += way.latency_seconds
            transit.tail_at = tail
            transit.next_link += 1
            if transit.next_link < len(way.links):
                self._push(head, transit)
                return
        transit.arrives = True
        self._push(transit.tail_at, transit)

    def _resume_at(self, rank: SimulatedRank, seconds: float) -> None:
        if rank.resumes_at != seconds:
            rank.resumes_at = seconds
            self._push(seconds, rank)

    def _push(self, seconds: float, due: SimulatedRank | _Transit) -> None:
        self._number += 1
        heapq.heappush(self._due, (seconds, self._number, due))
