"""The ranks that an algorithm runs over, and their order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from mpitrain.profile import ring_order
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Group:
    """Some ranks of a communicator, in their own order.

    Attributes:
        comm: messages travel here, between these ranks only; no communicator is made.
        members: the ranks' numbers in `comm`.
        index: this rank's place among them.
    """

    comm: MPI.Comm
    members: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def rank(self, offset: int) -> int:
        """Return the rank in `comm` of the member `offset` places after this one, around the circle."""
        return self.members[(self.index + offset) % len(self.members)]


def segments(count: int, size: int, lengths: Sequence[int] | None = None) -> list[slice]:
    """Cut a buffer of `count` elements into one part per member, of these lengths, or else of equal lengths."""
    if lengths is None:
        return [part_of(count, index, size) for index in range(size)]
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def pieces_of(segment: slice, number: int) -> list[slice]:
    """Cut a segment into that many pieces; a piece of a short segment may be empty."""
    parts = (part_of(segment.stop - segment.start, piece, number) for piece in range(number))
    return [slice(segment.start + part.start, segment.start + part.stop) for part in parts]


def everyone(world: World) -> Group:
    """All ranks of the world, node by node: ranks of one node are neighbours, whatever the placement."""
    order = tuple(rank for node in ranks_by_node(world) for rank in node)
    return Group(world.comm, order, order.index(world.rank))


def of_this_node(world: World) -> Group:
    """The ranks that share this machine's memory."""
    mates = _mates(world)
    return Group(world.comm, mates, mates.index(world.rank))


def lane(world: World) -> Group | None:
    """The ranks with this rank's local rank, one of every node. None if a node has no such rank."""
    place = _mates(world).index(world.rank)
    if place >= num_lanes(world):
        return None
    members = tuple(ranks[place] for ranks in ranks_by_node(world))
    return Group(world.comm, members, members.index(world.rank))


def num_lanes(world: World) -> int:
    """The number of ranks on the smallest node."""
    return min(Counter(world.node_ranks).values())


def _mates(world: World) -> tuple[int, ...]:
    return tuple(rank for rank in range(world.size) if world.node_ranks[rank] == world.node_rank)


def ranks_by_node(world: World) -> list[tuple[int, ...]]:
    """The ranks of each node; the nodes are in the order in which a ring uses the fastest links."""
    ranks_of: defaultdict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(world.node_ranks):
        ranks_of[node].append(rank)
    nodes = [tuple(ranks) for _, ranks in sorted(ranks_of.items())]
    order = ring_order([world.hosts[ranks[0]] for ranks in nodes], world.profile)
    return [nodes[place] for place in order]
