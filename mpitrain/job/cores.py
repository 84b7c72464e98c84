"""The cores that a rank has for itself."""

from __future__ import annotations

import os
from pathlib import Path

from mpitrain.world import World


def own_cores(world: World) -> float:
    """The cores of this machine for each of its ranks, also of those on other hosts of it, such as containers.

    Collective. Ranks may be bound to different cores: all that one of them may use count.
    """
    machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    of_all = world.allgather((machine, os.sched_getaffinity(0)))
    here = [cores for one, cores in of_all if one == machine]
    return len(set().union(*here)) / len(here)
