"""Allreduce algorithms: each replaces a flat buffer by its sum over all ranks.

To add an algorithm, write a file with a factory that takes a World, and add a line below. It then inherits the contract
tests (tests/ranks/test_allreduce.py), the benchmark and MPITRAIN_ALGORITHM. An entry with steps over a group of ranks
also runs between nodes, and `auto` uses an entry with a cost wherever it is the fastest.
"""

from __future__ import annotations

from mpitrain.allreduce.algorithm import Halves, Sequential, of_group
from mpitrain.allreduce.direct import (
    direct,
    direct_allgather,
    direct_reduce_scatter,
    direct_seconds,
    direct_seen,
    direct_steps,
)
from mpitrain.allreduce.group import everyone
from mpitrain.allreduce.halving_doubling import (
    doubling_allgather,
    halving_doubling,
    halving_doubling_steps,
    halving_reduce_scatter,
)
from mpitrain.allreduce.hierarchical import hierarchical, hierarchical_halves, hierarchical_seconds
from mpitrain.allreduce.native import native, native_seconds, native_steps
from mpitrain.allreduce.recursive_doubling import recursive_doubling, recursive_doubling_steps
from mpitrain.allreduce.registry import ALGORITHMS, Entry
from mpitrain.allreduce.ring import ring, ring_allgather, ring_reduce_scatter, ring_seconds, ring_steps
from mpitrain.allreduce.select import auto, auto_halves, auto_seen
from mpitrain.allreduce.shared_memory import (
    shared_memory,
    shared_memory_halves,
    shared_memory_seconds,
    shared_memory_seen,
)
from mpitrain.errors import ConfigError, everywhere
from mpitrain.world.world import World

__all__ = ["ALGORITHMS", "Entry", "check_name", "make_algorithm", "make_halves"]

ALGORITHMS |= {
    "auto": Entry(auto, halves=auto_halves, seen=auto_seen),
    "native": Entry(native, native_steps, native_seconds),
    "shared_memory": Entry(
        shared_memory, seconds=shared_memory_seconds, halves=shared_memory_halves, seen=shared_memory_seen
    ),
    "hierarchical": Entry(hierarchical, seconds=hierarchical_seconds, halves=hierarchical_halves),
    "ring": Entry(ring, ring_steps, ring_seconds, ring_reduce_scatter, ring_allgather, is_alike=True),
    "direct": Entry(
        direct, direct_steps, direct_seconds, direct_reduce_scatter, direct_allgather, is_alike=True, seen=direct_seen
    ),
    "recursive_doubling": Entry(recursive_doubling, recursive_doubling_steps),
    "halving_doubling": Entry(
        halving_doubling,
        halving_doubling_steps,
        reduce_scatter=halving_reduce_scatter,
        allgather=doubling_allgather,
    ),
}


def make_algorithm(world: World, name: str | None = None) -> Sequential:
    """Make the algorithm of that name, or of the world's settings. Collective.

    Raises:
        ConfigError: there is no algorithm of that name, or it does not suit this world.
        MismatchError: the ranks give different names.
    """
    name = world.config.algorithm if name is None else name
    check_name(name)
    world.agree("make an algorithm", [name])
    return ALGORITHMS[name].make(world)


def make_halves(world: World, name: str | None = None) -> Halves:
    """Make the halves of the algorithm of that name, or of the world's settings. Collective.

    Raises:
        ConfigError: there is no algorithm of that name, it has no halves, or it does not suit this world. Raised on
            every rank.
        MismatchError: the ranks give different names.
    """
    name = world.config.algorithm if name is None else name
    check_name(name)
    world.agree("make the halves of an algorithm", [name])
    entry = ALGORITHMS[name]
    if entry.halves is not None:
        return entry.halves(world)
    if entry.reduce_scatter is None or entry.allgather is None:
        known = ", ".join(sorted(other for other, one in ALGORITHMS.items() if one.halves or one.reduce_scatter))
        raise everywhere(
            ConfigError(
                f"the algorithm {name} has no halves: it has no separate reduce-scatter; those that have one "
                f"are {known}. Set MPITRAIN_ALGORITHM to one of them"
            )
        )
    group = everyone(world)
    return of_group(name, group, entry.reduce_scatter(group), entry.allgather(group))


def check_name(name: str) -> None:
    """Raise ConfigError unless there is an algorithm of that name."""
    if name not in ALGORITHMS:
        raise ConfigError(f"there is no allreduce algorithm {name!r}; known: {', '.join(sorted(ALGORITHMS))}")
