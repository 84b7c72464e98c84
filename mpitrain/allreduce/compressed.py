"""The sum in the form of a codec between nodes, exact inside a node. ALGORITHMS holds no sums that round like this."""

from __future__ import annotations

from mpitrain.allreduce.algorithm import Sequential
from mpitrain.allreduce.direct import direct_steps
from mpitrain.allreduce.gathered import gathered_steps
from mpitrain.allreduce.hierarchical import hierarchical_steps
from mpitrain.allreduce.shared_memory import NodeArrays
from mpitrain.compression.codec import Codec
from mpitrain.world import World


def compressed(world: World, codec: Codec) -> Sequential:
    """For float32 arrays only. See Algorithm for the contract, direct.py and gathered.py for the rounding."""
    memory = NodeArrays(world)
    between = gathered_steps if codec.gathered else direct_steps
    steps = hierarchical_steps(world, memory, lambda group: between(group, codec))
    return Sequential(world, codec.name, steps, memory)
