"""A worker: a rank that runs what the leader sends, until the block ends."""

from __future__ import annotations

from mpitrain.remote.execute import execute
from mpitrain.remote.link import CALL, END, RankLink, driven
from mpitrain.world import World


def serve(world: World, leader: int, device: str) -> bool:
    """Run the leader's functions on this rank. Return whether the communicator of `world` is to be freed."""
    link = RankLink(world.comm, leader)
    name = world.name(leader)
    while True:
        kind, frames = driven(world.control, link.receive(), f"mt.workers, for a function from {name}", (leader,))
        if kind != CALL:
            return kind == END
        answer = execute(world, frames, device)
        del frames  # the arguments; the answer may be as large
        world.control.wait(link.send(*answer), f"send the result of a function to {name}", (leader,))
