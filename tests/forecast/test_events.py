"""Messages over simulated links. Every expected time is worked out by hand from n / B and L."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy
import pytest

from mpitrain.errors import MpitrainError
from mpitrain.forecast.events import Events, Network
from mpitrain.forecast.machines import Machines, equal_machines
from mpitrain.forecast.sums import SimulatedComm, without_contents

RATE, LATENCY = 1e6, 0.25
SECOND = 1_000_000  # bytes that a link carries in a second


def test_one_message() -> None:
    """L + n / B, and an empty one L."""
    assert arrivals(machines(2), [(0, 1, SECOND)]) == [1.25]
    assert arrivals(machines(2), [(0, 1, 0)]) == [0.25]


def test_one_sender() -> None:
    """The link out of a node serves one message after the other, to whomever they go."""
    assert arrivals(machines(3), [(0, 1, SECOND), (0, 2, 2 * SECOND)]) == [1.25, 3.25]


def test_one_receiver() -> None:
    """And so does the link into a node, in the order in which messages reach it: here that of their posts."""
    assert arrivals(machines(3), [(0, 2, SECOND), (1, 2, SECOND)]) == [1.25, 2.25]
    # The second one of rank 1 reaches node 2 at 1.25, and that of rank 0, whose first one is long, at 2.25.
    crossing = [(0, 3, 2 * SECOND), (0, 2, SECOND), (1, 3, SECOND), (1, 2, SECOND)]
    assert arrivals(machines(4), crossing) == [2.25, 3.25, 3.25, 2.25]


def test_both_directions_at_once() -> None:
    assert arrivals(machines(2), [(0, 1, SECOND), (1, 0, SECOND)]) == [1.25, 1.25]


def test_a_slow_link() -> None:
    """Of two links, the slower one counts, wherever it is."""
    slow = replace(machines(2), link_bytes_per_second=(RATE, RATE / 4))
    assert arrivals(slow, [(0, 1, SECOND)]) == [4.25]
    assert arrivals(slow, [(1, 0, SECOND)]) == [4.25]


def test_a_slow_pair() -> None:
    """A pair may be slower than both links, and leaves what it does not use to others."""
    pairs = tuple(tuple(RATE / 2 if {one, two} == {0, 1} else RATE for two in range(3)) for one in range(3))
    slow = replace(machines(3), pairs=pairs)
    assert arrivals(slow, [(0, 1, SECOND), (0, 2, SECOND)]) == [2.25, 2.25]


def test_an_oversubscribed_uplink_halves_the_rate() -> None:
    """Two nodes of a rack send 10 messages each into another rack, over an uplink as fast as one link."""
    many = [(node, node + 2, SECOND // 10) for _ in range(10) for node in (0, 1)]
    assert max(arrivals(machines(4), many)) == pytest.approx(1.25, rel=1e-12)
    racks = replace(machines(4), nodes_per_rack=2, uplink_bytes_per_second=RATE)
    assert max(arrivals(racks, many)) == pytest.approx(2.25, rel=1e-12)
    # Messages within a rack do not pass it.
    within = [(0, 1, SECOND), (1, 0, SECOND), (2, 3, SECOND), (3, 2, SECOND)]
    assert arrivals(racks, within) == [1.25] * 4


def test_inside_a_node() -> None:
    """No link is used: two messages at once take as long as one."""
    node = replace(machines(1), ranks_per_node=3, inside_bytes_per_second=4 * RATE, inside_latency_seconds=0.5)
    assert arrivals(node, [(0, 1, SECOND), (0, 2, SECOND), (2, 1, SECOND)]) == [0.75] * 3


def test_messages_with_one_tag_keep_their_order() -> None:
    """Receives that are posted late take the messages in the order of their sends."""
    events = Events(Network(machines(2), (0, 1)), 2)
    taken = []

    def sender() -> Iterator[object]:
        comm = SimulatedComm(events, events.ranks[0], 2)
        sends = [comm.Isend(array(length), 1, tag) for length, tag in ((SECOND, 7), (0, 8), (2 * SECOND, 7))]
        while not all(send.Test() for send in sends):
            yield None
        taken.append(("sent", events.ranks[0].clock))

    def receiver() -> Iterator[object]:
        comm, rank = SimulatedComm(events, events.ranks[1], 2), events.ranks[1]
        late = events.until(rank, 2.0)
        while not late.Test():
            yield None
        for tag in (7, 7, 8):
            receive = comm.Irecv(array(2 * SECOND), 0, tag)
            while not receive.Test():
                yield None
            taken.append((str(tag), rank.clock))

    events.run([sender(), receiver()])
    assert taken == [("7", 2.0), ("sent", 3.0), ("7", 3.25), ("8", 3.25)]


def test_work_delays_what_is_posted_after_it() -> None:
    """An addition takes 4 bytes an element over the rate of the memory, and so much later the message goes."""
    events = Events(Network(machines(2), (0, 1)), 2)

    def added(num_bytes: int) -> None:
        events.running.clock += num_bytes / RATE

    flat = without_contents(SECOND // 4, numpy.dtype(numpy.float32), added, lambda _: None)

    def adds_and_sends() -> Iterator[object]:
        numpy.add(flat, flat, out=flat)
        assert events.ranks[0].clock == 1.0
        send = SimulatedComm(events, events.ranks[0], 2).Isend(flat[: flat.size // 2], 1, 1)
        while not send.Test():
            yield None

    def receives() -> Iterator[object]:
        receive = SimulatedComm(events, events.ranks[1], 2).Irecv(flat[: flat.size // 2], 0, 1)
        while not receive.Test():
            yield None

    events.run([adds_and_sends(), receives()])
    assert [rank.clock for rank in events.ranks] == [1.5, 1.75]


def test_messages_of_one_time_leave_in_the_order_of_their_posts() -> None:
    """One is posted at the end of an addition, before its time has come; the other at that time, for another reason."""
    events = Events(Network(machines(3), (0, 1, 2)), 3)
    flat = without_contents(SECOND // 4, numpy.dtype(numpy.float32), lambda _: None, lambda _: None)

    def posts_ahead() -> Iterator[object]:
        rank = events.ranks[0]
        comm, due = SimulatedComm(events, rank, 3), events.until(rank, 1.0)
        rank.clock = 1.0
        sends = [comm.Isend(flat, 1, 1)]
        yield None
        assert due.Test()
        sends.append(comm.Isend(flat, 2, 1))
        while not all(send.Test() for send in sends):
            yield None

    def receives(rank: int) -> Iterator[object]:
        receive = SimulatedComm(events, events.ranks[rank], 3).Irecv(flat, 0, 1)
        while not receive.Test():
            yield None

    events.run([posts_ahead(), receives(1), receives(2)])
    assert [rank.clock for rank in events.ranks] == [3.0, 2.25, 3.25]


def test_ranks_that_wait_for_nothing_are_named() -> None:
    events = Events(Network(machines(3), (0, 1, 2)), 3)

    def waits(rank: int) -> Iterator[object]:
        receive = SimulatedComm(events, events.ranks[rank], 3).Irecv(array(1), (rank + 1) % 3, 1)
        while rank and not receive.Test():
            yield None

    with pytest.raises(MpitrainError, match="2 of 3 ranks, the first one rank 1, wait for messages"):
        events.run([waits(rank) for rank in range(3)])


def machines(num_nodes: int) -> Machines:
    """Nodes of one rank, whose links carry a megabyte in a second."""
    return equal_machines(num_nodes, bytes_per_second=RATE, latency_seconds=LATENCY)


def arrivals(there: Machines, messages: list[tuple[int, int, int]]) -> list[float]:
    """When each of these messages arrives, if all are posted at time 0. Source, target, bytes."""
    size = there.num_ranks
    events = Events(Network(there, there.nodes_of(size)), size)
    at: dict[int, float] = {}

    def work(rank: int) -> Iterator[object]:
        comm = SimulatedComm(events, events.ranks[rank], size)
        coming = {
            number: comm.Irecv(array(length), source, number)
            for number, (source, target, length) in enumerate(messages)
            if target == rank
        }
        for number, (source, target, length) in enumerate(messages):
            if source == rank:
                comm.Isend(array(length), target, number)
        while coming:
            for number in [number for number, receive in coming.items() if receive.Test()]:
                at[number] = events.ranks[rank].clock
                del coming[number]
            if coming:
                yield None

    events.run([work(rank) for rank in range(size)])
    return [at[number] for number in range(len(messages))]


def array(num_bytes: int) -> numpy.ndarray:
    """Any array of so many bytes."""
    return numpy.empty(num_bytes, numpy.uint8)
