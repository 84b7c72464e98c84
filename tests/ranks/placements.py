"""Worlds as they would be with their ranks on several nodes: what continues between nodes can be tried on one."""

from __future__ import annotations

from collections.abc import Callable

from mpitrain import World

# The node of rank r.
PLACEMENTS: dict[str, Callable[[int], int]] = {
    "dealt out over 2 nodes": lambda rank: rank % 2,
    "3 nodes of different size": lambda rank: (0, 1, 1, 2, 2, 2, 2)[rank],
    "alone on each node": lambda rank: rank,
}


def placed(world: World, placement: str) -> World:
    """The world with its ranks where the placement says."""
    return world.replaced(node_ranks=tuple(PLACEMENTS[placement](rank) for rank in range(world.size)))
