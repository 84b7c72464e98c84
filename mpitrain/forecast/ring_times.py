"""The times of a ring's messages without events, which are the same to the last bit: for a thousand ranks that differ.

Events take 20 us a message, and a ring of p ranks sends 2 p (p - 1) messages for each bucket. But where each link
carries the messages of one pair of neighbours only, no two ranks compete for a link, and the order on each link is
known before any time is. So the messages are taken from the code of the ring once (`RecordedRing`). Then their times
follow number by number, for each rank from those of its left neighbour:

    number j of rank r      sent        when the pieces that it waits for are ready, and fewer than `ahead` are sending
                            arrives     over the links of events.py, after number j - 1
                            is ready    when it has arrived, number j - 1 is ready, and it has been added

One effect is not known in that order: while a rank adds, it does not notice that a message has left, and sends the next
one later. This delay changes nothing while the link still has older messages to send. The loop checks this, and gives
up otherwise: then the events decide (training.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from mpitrain.allreduce.group import Group
from mpitrain.allreduce.ring import AHEAD, around
from mpitrain.compression.kernels import compiled
from mpitrain.forecast.events import Network, Way
from mpitrain.forecast.machines import Machines
from mpitrain.waiting.pieces import Mover, Receive, Send

_MOST_LINKS = 4  # of a way: out, up, down, in


class OrderUnknownError(Exception):
    """The times depend on an order that only the events determine."""


class RecordedRing(NamedTuple):
    """The messages of one sum, from the code that sends them. Rows are numbers of the sequence, columns places.

    Attributes:
        sent_bytes: int32[numbers, places]: of the message that each place sends to the next one.
        after: int64[numbers]: how many pieces must be ready before it is sent.
        adds: bool[numbers]: whether what comes is added.
        overwrites_after: int64[numbers]: how many messages must have left before what comes is ready.
    """

    sent_bytes: numpy.ndarray
    after: numpy.ndarray
    adds: numpy.ndarray
    overwrites_after: numpy.ndarray


class _Recorder(Mover):
    """Takes what a Mover would send and receive, and moves nothing."""

    def __init__(self) -> None:
        self.sends: Sequence[Send] = ()
        self.receives: Sequence[Receive] = ()

    def run(self, sends: Sequence[Send], receives: Sequence[Receive], add: object = None) -> Any:
        """See Mover."""
        self.sends, self.receives = sends, receives
        return iter(())


class _Length:
    """An array that has only a length, because slices of arrays of NumPy would take most of the time."""

    __slots__ = ("itemsize", "nbytes", "size")

    def __init__(self, size: int, itemsize: int) -> None:
        self.size, self.itemsize, self.nbytes = size, itemsize, size * itemsize

    def view(self, dtype: type[numpy.generic]) -> _Length:
        """As of an array."""
        itemsize = numpy.dtype(dtype).itemsize
        return _Length(self.nbytes // itemsize, itemsize)

    def __getitem__(self, part: slice) -> _Length:
        return _Length(part.stop - part.start, self.itemsize)


def record_ring(groups: Sequence[Group], count: int) -> RecordedRing:
    """Record the sum of `count` float32 over the members of a group. `groups`: as each member has it, by place."""
    flat: Any = _Length(count, 4)
    sent, order = [], None
    for group in groups:
        recorder = _Recorder()
        around(group, recorder, reduces=True, gathers=True)(flat)
        sent.append(numpy.array([part.nbytes for _, part, _ in recorder.sends], numpy.int32))
        one = (
            [after for _, _, after in recorder.sends],
            [adds for _, _, adds, _ in recorder.receives],
            [after for _, _, _, after in recorder.receives],
        )
        order = order or one
        if one != order:
            raise AssertionError(f"the ring of place {group.index} has another order than that of place 0")
    assert order is not None
    after, adds, overwrites_after = (numpy.array(numbers) for numbers in order)
    return RecordedRing(numpy.stack(sent, axis=1), after, adds, overwrites_after)


def knows_order(network: Network, members: Sequence[int]) -> bool:
    """True if a ring over these ranks, in this order, has each link for one pair of neighbours, on different nodes."""
    ways = _ways(network, members)
    links = [id(link) for way in ways for link in way.links]
    return all(way.links for way in ways) and len(links) == len(set(links))


class RingTimes:
    """The sums of a training by a ring, bucket after bucket. The links of the network carry them."""

    def __init__(self, network: Network, machines: Machines, groups: Sequence[Group], ends: Sequence[int]) -> None:
        """Record them.

        Args:
            groups: see simulated_groups.
            ends: the place in the gradients at which each bucket ends.
        """
        self._members = numpy.array(groups[0].members)
        ways = _ways(network, groups[0].members)
        self._all_links = [link for way in ways for link in way.links]
        numbers = {id(link): number for number, link in enumerate(self._all_links)}
        self._links = numpy.full((len(ways), _MOST_LINKS), -1)
        for place, way in enumerate(ways):
            self._links[place, : len(way.links)] = [numbers[id(link)] for link in way.links]
        self._latencies = numpy.array([way.latency_seconds for way in ways])
        self._least = numpy.array([way.seconds_per_byte for way in ways])
        self._rates = numpy.array([link.seconds_per_byte for link in self._all_links])
        self._free, self._busy = numpy.zeros((2, len(self._all_links)))
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        recorded = {count: record_ring(groups, count) for count in set(lengths)}
        self._buckets = [recorded[count] for count in lengths]
        longest = max(len(one.after) for one in self._buckets)
        self._left = numpy.empty((longest, len(ways)))
        self._ready = numpy.empty((longest, len(ways)))
        self._add_bytes_per_second = machines.costs.add_bytes_per_second
        self._loop: Callable[..., bool] = compiled(ring_loop)

    def sum_buckets(self, begins: numpy.ndarray, ready_at: numpy.ndarray) -> numpy.ndarray:
        """Make the sums of one step.

        Args:
            begins: float64[ranks]: when each rank begins the step.
            ready_at: float64[buckets, ranks]: when the gradients of a bucket are there.

        Returns:
            float64[ranks]: when each rank has the last sum.

        Raises:
            OrderUnknownError: see the module. The times of this object are then invalid.
        """
        ends = begins[self._members]
        for bucket, ready in zip(self._buckets, ready_at[:, self._members], strict=True):
            begin = numpy.maximum(ends, ready)
            if not self._loop(
                *bucket, AHEAD, self._add_bytes_per_second, begin, self._links, self._latencies, self._least,
                self._rates, self._free, self._busy, self._left, self._ready, ends,
            ):  # fmt: skip
                raise OrderUnknownError
        for link, free, busy in zip(self._all_links, self._free.tolist(), self._busy.tolist(), strict=True):
            link.free_at, link.busy_seconds = free, busy
        result: numpy.ndarray = numpy.empty_like(ends)
        result[self._members] = ends
        return result


def ring_loop(
    sent_bytes: numpy.ndarray,
    after: numpy.ndarray,
    adds: numpy.ndarray,
    overwrites_after: numpy.ndarray,
    ahead: int,
    add_bytes_per_second: float,
    begins: numpy.ndarray,
    links: numpy.ndarray,
    latencies: numpy.ndarray,
    least: numpy.ndarray,
    rates: numpy.ndarray,
    free: numpy.ndarray,
    busy: numpy.ndarray,
    left: numpy.ndarray,
    ready: numpy.ndarray,
    ends: numpy.ndarray,
) -> bool:
    """Compute the times of one sum. For Numba. Each operation is that of events.py.

    Args:
        sent_bytes, after, adds, overwrites_after: see RecordedRing.
        ahead: messages that a rank is sending at most.
        begins: float64[places]: when each place begins the sum.
        links: int64[places, _MOST_LINKS]: numbers of the links to the next place; -1: none.
        latencies, least: float64[places]: of a Way, latency_seconds and seconds_per_byte.
        rates: float64[links]: seconds per byte.
        free, busy: float64[links]: see SimulatedLink; changed.
        left, ready: float64[numbers or more, places]: scratch.
        ends: float64[places]: overwritten with the time at which each place has the sum, and all has left.

    Returns:
        False if the order is unknown; see the module.
    """
    numbers, places = sent_bytes.shape
    longest = sent_bytes.max() / add_bytes_per_second
    for j in range(numbers):
        for r in range(places):
            at = begins[r]
            if after[j] > 0:
                at = max(at, ready[after[j] - 1, r])
            link = links[r, 0]
            num_bytes = sent_bytes[j, r]
            if j >= ahead and left[j - ahead, r] > at - longest:
                at = max(at, left[j - ahead, r])
                # It may be sent two additions later: during the first one nothing is noticed, and the second one may
                # begin before what was noticed is used.
                if longest > 0 and free[link] < at + 2 * longest:
                    return False
            head = max(free[link], at)
            seconds = num_bytes * rates[link]
            free[link] = head + seconds
            busy[link] += seconds
            gone = max(free[link], head + num_bytes * least[r])
            head += latencies[r]
            tail = gone + latencies[r]
            for k in range(1, links.shape[1]):
                link = links[r, k]
                if link < 0:
                    break
                head = max(free[link], head)
                seconds = num_bytes * rates[link]
                free[link] = head + seconds
                busy[link] += seconds
                tail = max(free[link], tail)
            left[j, r] = max(gone, left[j - 1, r]) if j > 0 else gone
            ends[(r + 1) % places] = tail  # it arrives there
        for r in range(places):
            at = max(ends[r], ready[j - 1, r] if j > 0 else begins[r])
            if overwrites_after[j] > 0:
                at = max(at, left[overwrites_after[j] - 1, r])
            if adds[j]:
                at += sent_bytes[j, r - 1] / add_bytes_per_second
            ready[j, r] = at
    for r in range(places):
        ends[r] = max(ready[numbers - 1, r], left[numbers - 1, r])
    return True


def _ways(network: Network, members: Sequence[int]) -> list[Way]:
    """From each member to the next one."""
    return [network.way(one, members[(place + 1) % len(members)]) for place, one in enumerate(members)]
