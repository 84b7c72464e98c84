"""The events of a simulation, in the order of their times, and the ranks that they resume.

A rank is a generator, such as the steps of an allreduce: it does what can be done now, and yields while it must wait.
`Pending.Test`, MPI's way to ask whether a message is complete, compares the time of completion with the clock of the
rank. A rank that has yielded is resumed when the next of its messages is complete.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from mpitrain.errors import MpitrainError
from mpitrain.simulate.network import Network, Way

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
        running: the rank whose work goes on now.
        now: the time of the last event.
        sent: for each message, in the order of the posts: source, target, tag, bytes. None unless `records`.
    """

    def __init__(self, network: Network, num_ranks: int, *, records: bool = False, num_alike: int = 0) -> None:
        """`num_alike`: the number of ranks that do what the only one does, itself among them; 0: each has its own."""
        self.ranks = [SimulatedRank(number) for number in range(num_ranks)]
        self.sent: list[tuple[int, int, int, int]] | None = [] if records else None
        self.running = self.ranks[0]  # the rank whose work goes on now
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
                f"the simulation stands still: {len(unfinished)} of {len(self.ranks)} ranks, the first one rank "
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
