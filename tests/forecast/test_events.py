"""Messages over simulated links, and sums of them: each time is worked out by hand from n / B and L."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy
import pytest

from mpitrain.allreduce import ALGORITHMS
from mpitrain.compression import make_codec
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.forecast.events import Events, Network
from mpitrain.forecast.machines import Machines, equal_machines
from mpitrain.forecast.sums import SimulatedComm, check_sum, flat_buffer, make_sums, without_contents

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


B, L = 1e8, 1e-3
MACHINES = equal_machines(8, bytes_per_second=B, latency_seconds=L)
ADD, COPY = MACHINES.costs.add_bytes_per_second, MACHINES.costs.copy_bytes_per_second


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7])
def test_ring_of_one_piece_a_segment(p: int) -> None:
    """2 (p - 1) times a segment over a link, one after the other, and p - 1 additions."""
    segment = 1000 * 4
    expected = 2 * (p - 1) * (L + segment / B) + (p - 1) * segment / ADD
    assert seconds("ring", p, 1000 * p) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_doubling_of_one_piece(p: int) -> None:
    """log2 p times the whole buffer, or halves of it down and up again."""
    phases, whole = p.bit_length() - 1, 8000 * 4
    assert seconds("recursive_doubling", p, 8000) == pytest.approx(phases * (L + whole / B + whole / ADD), rel=1e-12)
    part = whole * (p - 1) / p
    expected = 2 * (phases * L + part / B) + part / ADD
    assert seconds("halving_doubling", p, 8000) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [2, 3, 5])
def test_direct_of_one_piece(p: int) -> None:
    """p - 1 segments over each link in each phase; the last one that comes is added alone."""
    segment = 1000 * 4
    expected = 2 * (L + (p - 1) * segment / B) + segment / ADD
    assert seconds("direct", p, 1000 * p) == pytest.approx(expected, rel=1e-9)


def test_a_long_ring_is_bound_by_the_link() -> None:
    """With many pieces, latencies and additions hide behind the link: 2 (p - 1) / p N / B, and 1 % more at most."""
    count = 20_000_000
    bound = 2 * 3 / 4 * count * 4 / B
    assert bound < seconds("ring", 4, count) < bound * 1.01


def test_one_node() -> None:
    """shared_memory: k - 1 additions and k - 1 copies of a kth of the buffer, and two meetings of log2 k messages."""
    node = replace(equal_machines(1, ranks_per_node=4), inside_latency_seconds=1e-5)
    count = 400_000
    part = count
    expected = 3 * part / ADD + 3 * part / COPY + 4 * 1e-5
    assert seconds("shared_memory", 4, count, node) == pytest.approx(expected, rel=1e-12)


def test_several_ranks_on_a_node() -> None:
    """hierarchical: each byte crosses a link once a node, so no longer with k ranks, but for the memory's time."""
    wide = replace(MACHINES, ranks_per_node=2, inside_latency_seconds=0.0)
    count = 20_000_000
    inside = count * 4 / 2 / ADD + count * 4 / 2 / COPY
    bound = 2 * 3 / 4 * count * 4 / B + inside
    assert bound * 0.999 < seconds("hierarchical", 8, count, wide) < bound * 1.02


@pytest.mark.parametrize("codec", ["int8", "bf16", "top_k:0.05"])
def test_a_codec_takes_its_bytes_and_its_time(codec: str) -> None:
    """On two nodes: both halves or the whole of the buffer, as the real codec packs it; and the time at its rate."""
    count, near = 2_000_000, replace(MACHINES, latency_seconds=0.0)
    real = make_codec(codec)
    way = real.wire_bytes(count) if real.gathered else 2 * real.wire_bytes(count // 2)
    assert seconds("auto", 2, count, near, codec=codec) == pytest.approx(way / B, rel=0.01)
    # A profile has codecs by their names without a setting.
    slow = replace(MACHINES, costs=replace(MACHINES.costs, codecs=((codec.partition(":")[0], 1e6),)))
    # direct: halves are encoded and added, the sum is encoded, and both halves are decoded; gathered: the whole is
    # encoded, decoded and added.
    passes = 3 * 1.0 if real.gathered else 5 * 0.5
    assert seconds("auto", 2, count, slow, codec=codec) == pytest.approx(count * 4 * passes / 3e6, rel=0.02)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("name", sorted(name for name, entry in ALGORITHMS.items() if entry.over and name != "native"))
def test_algorithms_in_which_all_ranks_are_alike(name: str, p: int) -> None:
    """With Entry.is_alike, a rank sends what rank 0 sends, as far on. No other algorithm does so on 3 ranks."""
    node_of = tuple(range(p))
    events = Events(Network(MACHINES, node_of), p, records=True)
    flat = flat_buffer(events, MACHINES, 420 * 1000)
    events.run([steps(flat) for steps in make_sums(events, MACHINES, node_of, name, "none")])
    assert events.sent is not None
    ways: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]
    for source, target, tag, num_bytes in events.sent:
        ways[source].append(((target - source) % p, tag, num_bytes))
    are_alike = all(sorted(way) == sorted(ways[0]) for way in ways)
    if ALGORITHMS[name].is_alike or p == 3:
        assert are_alike == ALGORITHMS[name].is_alike


def test_sums_that_cannot_be_simulated() -> None:
    for name in ALGORITHMS:
        if name == "native":
            with pytest.raises(ConfigError, match="native is MPI's own allreduce"):
                check_sum(name, "none", 2)
        elif name == "shared_memory":
            with pytest.raises(ConfigError, match="for ranks on one node; these are on 2 nodes"):
                check_sum(name, "none", 2)
        else:
            check_sum(name, "none", 2)
    with pytest.raises(ConfigError, match="there is no allreduce algorithm 'rign'; known: auto, direct"):
        check_sum("rign", "none", 2)
    with pytest.raises(ConfigError, match="the codec 'power_sgd' cannot be simulated; known: none, bf16"):
        check_sum("auto", "power_sgd", 2)
    with pytest.raises(ConfigError, match="leave out --algorithms ring"):
        check_sum("ring", "int8", 2)
    measured = replace(MACHINES.costs, origin="lab.json", nodes=("a", "b"), codecs=(("bf16", 1e9), ("int8", 1e9)))
    with pytest.raises(ConfigError, match=r"lab\.json has no time of the codec top_k, only of: bf16, int8\. Measure"):
        check_sum("auto", "top_k:0.1", 2, measured)
    check_sum("auto", "top_k:0.1", 1, measured)  # nothing is coded on one node
    check_sum("auto", "int8", 2, measured)


def test_a_buffer_longer_than_the_memory() -> None:
    """700 GB: slices and views of it have their lengths, and adding and copying take their time."""
    events = Events(Network(MACHINES, (0,)), 1)
    flat = flat_buffer(events, MACHINES, 175_000_000_000)
    part = flat[1_000_000_000:3_000_000_000]
    octets = part.view(numpy.uint8)
    assert (flat.nbytes, part.size, octets.size) == (700_000_000_000, 2_000_000_000, 8_000_000_000)
    assert octets[4:].view(numpy.float32).size == 1_999_999_999
    part += part
    assert events.running.clock == pytest.approx(8e9 / ADD)
    octets[:1000] = octets[1000:2000]
    assert events.running.clock == pytest.approx(8e9 / ADD + 1000 / COPY)


def seconds(name: str, num_ranks: int, count: int, machines: Machines = MACHINES, codec: str = "none") -> float:
    """The time until the last rank has the sum."""
    node_of = machines.nodes_of(num_ranks)
    events = Events(Network(machines, node_of), num_ranks)
    flat = flat_buffer(events, machines, count)
    events.run([steps(flat) for steps in make_sums(events, machines, node_of, name, codec)])
    return max(rank.clock for rank in events.ranks)
