"""The ranks that an algorithm runs over, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.profile import ring_order
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
    order = tuple(rank for node in _nodes(world) for rank in node)
    return Group(world.comm, order, order.index(world.rank))


def of_this_node(world: World) -> Group:
    """The ranks that share this machine's memory."""
    mates = _mates(world)
    return Group(world.comm, mates, mates.index(world.rank))


def lane(world: World) -> Group | None:
    """One rank of every node: those with this rank's local rank. None where a node has no such rank."""
    place = _mates(world).index(world.rank)
    if place >= num_lanes(world):
        return None
    members = tuple(ranks[place] for ranks in _nodes(world))
    return Group(world.comm, members, members.index(world.rank))


def num_lanes(world: World) -> int:
    """How many ranks the smallest node has."""
    return min(world.node_ranks.count(node) for node in set(world.node_ranks))


def _mates(world: World) -> tuple[int, ...]:
    return tuple(rank for rank in range(world.size) if world.node_ranks[rank] == world.node_rank)


def _nodes(world: World) -> list[tuple[int, ...]]:
    """The ranks of each node; the nodes in the order in which a ring goes through the fastest links."""
    nodes = [
        tuple(rank for rank in range(world.size) if world.node_ranks[rank] == node)
        for node in sorted(set(world.node_ranks))
    ]
    order = ring_order([world.hosts[ranks[0]] for ranks in nodes], world.profile)
    return [nodes[place] for place in order]
