"""Copies in memory of several hosts: all ranks go on from one of them."""

from __future__ import annotations

from contextlib import closing

import numpy

from keeping import keeper
from mpitrain import World
from mpitrain.launch.kept import KeeperLine
from mpitrain.state.copies import KeptCopies, state_name
from mpitrain.state.memory_slot import MemorySlot
from mpitrain.state.names import split

from .placements import placed


def test_hosts_that_have_counted_alike_with_other_states(world: World) -> None:
    """Each host counts the copies of a step by itself, so equal numbers do not prove equal copies."""
    with keeper() as name, closing(KeeperLine(name, "try")) as line:
        slot = MemorySlot()
        line.keep(state_name(1), [slot.descriptor])
        slot.write(3, 1, 0, *split({"rank": world.rank, "w": numpy.full(world.rank + 1, world.rank)}))
        slot.close()
        copies = KeptCopies(placed(world, "alone on each node"), line, 1)
        assert copies.version == (3, 1)
        state = copies.read().state
    assert world.allgather((state["rank"], state["w"].tolist())) == [(0, [0])] * world.size
