"""Allreduce algorithms: each replaces a flat buffer by its sum over all ranks.

To add one: a file with a factory that takes a World, and a line below. It then inherits the contract tests
(tests/ranks/test_allreduce.py), the benchmark and MPITRAIN_ALGORITHM.
"""

from __future__ import annotations

from collections.abc import Callable

from mpitrain.allreduce.algorithm import Algorithm, Sequential
from mpitrain.allreduce.direct import direct
from mpitrain.allreduce.halving_doubling import halving_doubling
from mpitrain.allreduce.hierarchical import hierarchical
from mpitrain.allreduce.native import native
from mpitrain.allreduce.recursive_doubling import recursive_doubling
from mpitrain.allreduce.ring import ring
from mpitrain.allreduce.select import auto
from mpitrain.allreduce.shared_memory import shared_memory
from mpitrain.errors import ConfigError
from mpitrain.world import World

ALGORITHMS: dict[str, Callable[[World], Sequential]] = {
    "auto": auto,
    "direct": direct,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "native": native,
    "recursive_doubling": recursive_doubling,
    "ring": ring,
    "shared_memory": shared_memory,
}


def make_algorithm(world: World, name: str | None = None) -> Algorithm:
    """The algorithm of that name, or of the world's settings. Collective.

    Raises:
        ConfigError: there is no algorithm of that name, or it is not for this world.
        MismatchError: the ranks give different names.
    """
    name = world.config.algorithm if name is None else name
    check_name(name)
    world.agree("make an algorithm", [name])
    return ALGORITHMS[name](world)


def check_name(name: str) -> None:
    """Raise ConfigError unless there is an algorithm of that name."""
    if name not in ALGORITHMS:
        raise ConfigError(f"there is no allreduce algorithm {name!r}; known: {', '.join(sorted(ALGORITHMS))}")
