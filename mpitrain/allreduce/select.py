"""auto: the algorithm for a buffer's size, the same on all ranks because it depends on nothing else."""

from __future__ import annotations

import numpy

from mpitrain.allreduce.algorithm import Progress, Sequential
from mpitrain.allreduce.hierarchical import by_size, hierarchical_steps
from mpitrain.allreduce.native import native_steps
from mpitrain.allreduce.shared_memory import NodeArrays, shared_memory_steps
from mpitrain.world import World

NATIVE_BELOW_BYTES = 16 * 1024  # measured: see docs/log.md


def auto(world: World) -> Sequential:
    """native for what is small; then shared memory in a node, and between nodes. See Algorithm for the contract."""
    memory = NodeArrays(world)
    native = native_steps(world.comm)
    large = shared_memory_steps(memory) if world.num_nodes == 1 else hierarchical_steps(world, memory, by_size)

    def steps(flat: numpy.ndarray, residual: numpy.ndarray | None = None) -> Progress:
        return (native if flat.nbytes < NATIVE_BELOW_BYTES else large)(flat, residual)

    return Sequential(world, "auto", steps, memory.allocate)
