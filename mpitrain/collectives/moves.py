"""Moves arrays between all ranks, as steps over flat CPU arrays; non-blocking calls are made from these.

The moves use the communicator of the world's background, so they are work in its queue. Rank r exchanges with r+1 and
r-1 first, then with r+2 and r-2, and so on, so no rank is the target of all others at once. __init__.py lists how many
bytes move. Parts may have any number of bytes, even 0, but a rank must send exactly as many as the other expects.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from mpitrain.allreduce.algorithm import Progress
from mpitrain.waiting.control import until
from mpitrain.waiting.pieces import Combine, add
from mpitrain.world.world import World

SHORT_BYTES = 2**16  # up to this size, few messages matter more than few bytes; chosen, not measured


def reduce_scatter(
    world: World, parts: Sequence[numpy.ndarray], own: numpy.ndarray, combine: Combine = add
) -> Progress:
    """Add to `own`, this rank's values, the values that the others have for this rank; send them `parts`."""
    sends = [(rank, parts[rank]) for rank in _after(world)]
    return world.background.mover.move(sends, [(rank, own) for rank in _before(world)], add=combine)


def allgather(world: World, parts: Sequence[numpy.ndarray]) -> Progress:
    """Overwrite all parts except this rank's own with their owners' values."""
    sends = [(rank, parts[world.rank]) for rank in _after(world)]
    return world.background.mover.move(sends, [(rank, parts[rank]) for rank in _before(world)])


def alltoall(world: World, sends: Sequence[numpy.ndarray], receives: Sequence[numpy.ndarray]) -> Progress:
    """Return the array that each rank has for this one. This rank's own is not copied."""
    return world.background.mover.move(
        [(rank, sends[rank]) for rank in _after(world)], [(rank, receives[rank]) for rank in _before(world)]
    )


def broadcast(world: World, flat: numpy.ndarray, root: int) -> Progress:
    """Overwrite `flat` with `root`'s; along a chain if `flat` is long."""
    if flat.nbytes <= SHORT_BYTES:
        return until(world.background.comm.Ibcast(flat.view(numpy.uint8), root).Test)
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    is_root = world.rank == root
    sends = [] if right == root else [(right, flat)]
    return world.background.mover.move(sends, [] if is_root else [(left, flat)], forward=not is_root)


def gather(world: World, own: numpy.ndarray, parts: Sequence[numpy.ndarray], root: int) -> Progress:
    """Overwrite `root`'s `parts`, except its own, with the ranks' arrays. Other ranks' `parts` are ignored."""
    if world.rank != root:
        return world.background.mover.move([(root, own)], [])
    return world.background.mover.move([], [(rank, parts[rank]) for rank in _before(world)])


def scatter(world: World, own: numpy.ndarray, parts: Sequence[numpy.ndarray], root: int) -> Progress:
    """Overwrite the arrays of all ranks except `root` with `root`'s part for each. Other ranks' `parts` are ignored."""
    if world.rank != root:
        return world.background.mover.move([], [(root, own)])
    return world.background.mover.move([(rank, parts[rank]) for rank in _after(world)], [])


def _after(world: World) -> list[int]:
    """Yield all other ranks, the next one first."""
    return [(world.rank + distance) % world.size for distance in range(1, world.size)]


def _before(world: World) -> list[int]:
    return [(world.rank - distance) % world.size for distance in range(1, world.size)]
