"""The ranks that an algorithm runs over, and how long one of them may sleep while it waits for another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Group:
    """Some ranks of a communicator, in an order of their own.

    Attributes:
        comm: its messages travel here, between these ranks only; no communicator is made.
        members: their ranks in `comm`.
        index: this rank's place among them.
    """

    comm: MPI.Comm
    members: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.members)

    def rank(self, offset: int) -> int:
        """The rank in `comm` of the member `offset` places behind this one, around the circle."""
        return self.members[(self.index + offset) % len(self.members)]


def everyone(world: World) -> Group:
    """All ranks of the world, node by node: neighbours on one node stay neighbours, whatever the placement."""
    order = tuple(sorted(range(world.size), key=lambda rank: (world.node_ranks[rank], rank)))
    return Group(world.comm, order, order.index(world.rank))


def of_this_node(world: World) -> Group:
    """The ranks that share this machine's memory."""
    mates = _on_node(world, world.node_rank)
    return Group(world.comm, mates, mates.index(world.rank))


def lane(world: World) -> Group | None:
    """One rank of every node: those with this rank's local rank. None where a node has no such rank."""
    nodes = [_on_node(world, node) for node in sorted(set(world.node_ranks))]
    place = _on_node(world, world.node_rank).index(world.rank)
    if place >= min(len(ranks) for ranks in nodes):
        return None
    members = tuple(ranks[place] for ranks in nodes)
    return Group(world.comm, members, members.index(world.rank))


def num_lanes(world: World) -> int:
    """How many ranks the smallest node has."""
    return min(world.node_ranks.count(node) for node in set(world.node_ranks))


def _on_node(world: World, node: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(world.size) if world.node_ranks[rank] == node)


# Linux adds some 50 us to any sleep, so a shorter one is none; longer ones save little (docs/log.md).
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 200e-6
_NAPS_BETWEEN_EVENTS = 6


class Pace:
    """How long to sleep between two looks at the wire, from the time that lay between its events so far.

    On a slow link pieces arrive milliseconds apart, and a rank that polled all the while would use a core for nothing.
    On a fast one any sleep would let the wire run dry.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._between = 0.0

    def begin(self) -> None:
        """An exchange begins: the time since the last one does not count."""
        self._last = time.perf_counter()

    def happened(self) -> None:
        """Something arrived or left."""
        now = time.perf_counter()
        self._between += (min(now - self._last, 0.01) - self._between) / 8
        self._last = now

    def nap(self) -> float:
        """Seconds to sleep; 0: look again at once."""
        nap = self._between / _NAPS_BETWEEN_EVENTS
        return 0.0 if nap < _SHORTEST_NAP else min(nap, _LONGEST_NAP)
