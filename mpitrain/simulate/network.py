"""Links in simulated time: each serves one message at a time, in the order in which messages reach it.

    rank --> [link of its node, out] --latency--> ( [uplink of its rack] --> [downlink of the other rack] )
         --> [link of the other node, in] --> rank

A message is cut through: it goes on as soon as its first byte is there, and ends on a link no earlier than its last
byte has come. A message of n bytes over idle links of equal rate B with latency L takes L + n / B, the model of Hockney
(Hockney, The communication challenge for MPP, Parallel Computing 20 (1994) 389-398). Messages that share a link wait
for each other, as the gap per byte of LogGP makes them wait (Alexandrov, Ionescu, Schauser and Scheiman, LogGP, SPAA
1995).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpitrain.simulate.machines import Machines


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
        """Serve a message that reaches the link now. Return when its first byte goes on."""
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
