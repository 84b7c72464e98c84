"""The registry of allreduce algorithms, and the choice of the one with the lowest predicted time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy

from mpitrain.allreduce.algorithm import AddAll, Halves, Piece, Progress, Sequential, Steps
from mpitrain.allreduce.costs import Cost, Topology
from mpitrain.allreduce.group import Group
from mpitrain.world.world import World


class Entry(NamedTuple):
    """The registry's description of an algorithm.

    Attributes:
        make: makes it for a World. Collective.
        over: makes its steps for a group of ranks. Not collective: only the ranks of the group call it. None for an
            algorithm that works only for a whole World. `hierarchical` can run algorithms with `over` between nodes.
        seconds: the predicted time. `auto` and `hierarchical` use the algorithm with the lowest time; if times are
            equal, the first in the registry. None: neither of them uses this algorithm.
        reduce_scatter, allgather: make the two halves of an algorithm that has halves, each for use by itself. Not
            collective, like `over`. On one communicator, the queue keeps the messages of two pieces of work in order.
        halves: makes both halves for a World, if the algorithm has some, but none over a group. Collective.
        is_alike: if no part of the buffer is longer than another, every rank does the same: what rank r sends to rank
            r + i, rank 0 sends to rank i. So a simulation of rank 0 represents all ranks (forecast/training.py).
        seen: makes it for a World, with another function that adds up all summands of a part at once: for an algorithm
            that brings all of them to one rank. Collective. None if partial sums travel. Its result may also be None.
    """

    make: Callable[[World], Sequential]
    over: Callable[[Group], Steps] | None = None
    seconds: Cost | None = None
    reduce_scatter: Callable[[Group], Piece] | None = None
    allgather: Callable[[Group], Piece] | None = None
    halves: Callable[[World], Halves] | None = None
    is_alike: bool = False
    seen: Callable[[World, AddAll], Sequential | None] | None = None


ALGORITHMS: dict[str, Entry] = {}  # filled in __init__.py, which imports all algorithms

# Sizes at which candidates() asks for the fastest algorithm: powers of two from one byte to 1 TiB.
_PROBES = tuple(2**exponent for exponent in range(41))


def cheapest(num_bytes: int, topology: Topology, names: Iterable[str]) -> tuple[float, str]:
    """The lowest predicted time in seconds, and the name of its algorithm; if times are equal, the first."""
    return min(((predicted(name, num_bytes, topology), name) for name in names), key=lambda pair: pair[0])


def predicted(name: str, num_bytes: int, topology: Topology) -> float:
    """Return the algorithm's seconds for `num_bytes`; infinity if no time is predicted."""
    seconds = ALGORITHMS[name].seconds
    return math.inf if seconds is None else seconds(num_bytes, topology)


def priced(topology: Topology) -> list[str]:
    """The algorithms with a cost function that can run on this topology, in the order of the registry."""
    return [
        name
        for name, entry in ALGORITHMS.items()
        if entry.seconds is not None and (entry.over is not None or not topology.lanes)
    ]


def candidates(topology: Topology) -> list[str]:
    """Return the algorithms that are the fastest at some power of two of bytes. Others need not be made."""
    names = priced(topology)
    return list(dict.fromkeys(cheapest(num_bytes, topology, names)[1] for num_bytes in _PROBES))


def by_cost(topology: Topology, steps: Mapping[str, Steps]) -> Steps:
    """Make steps that run the fastest algorithm for the buffer's number of bytes.

    The choice depends only on the number of bytes and the topology, so all ranks make the same one.
    """
    choose = lru_cache(maxsize=1024)(lambda num_bytes: steps[cheapest(num_bytes, topology, steps)[1]])

    def chosen(flat: numpy.ndarray, residual: numpy.ndarray | None = None) -> Progress:
        return choose(flat.nbytes)(flat, residual)

    return chosen


def changes(choice: Callable[[int], str]) -> list[tuple[int, str]]:
    """Return the answers of `choice`, each with the number of bytes from which it holds; the first number is 0."""
    result = [(0, choice(1))]
    for high in _PROBES[1:]:
        while (text := result[-1][1]) != choice(high):
            first, last = max(high // 2, result[-1][0]), high  # `first` still has the old text
            while last - first > 1:
                middle = (first + last) // 2
                first, last = (middle, last) if choice(middle) == text else (first, middle)
            result.append((last, choice(last)))
    return result
