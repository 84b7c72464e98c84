"""The two halves of an allreduce over a whole World, for a caller that works on its own part in between.

    rank                0               1               2               3
    start           a0 b0 c0 d0     a1 b1 c1 d1     a2 b2 c2 d2     a3 b3 c3 d3
    reduce_scatter  A  .  .  .      .  B  .  .      .  .  C  .      .  .  .  D
    the caller      A'              B'              C'              D'
    allgather       A' B' C' D'     A' B' C' D'     A' B' C' D'     A' B' C' D'

Each half sends half of what the allreduce sends. The sums have the bits of the allreduce of the same name, because the
first half of that allreduce makes them, over the same parts.

An algorithm that has halves over a group (Entry.reduce_scatter, Entry.allgather) gets them from `of_group`. One for a
whole World has a function of its own (Entry.halves).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy

from mpitrain.allreduce.algorithm import Allocator, Piece, Progress
from mpitrain.allreduce.group import Group
from mpitrain.shard import part_of


class Halves(NamedTuple):
    """Both halves of one algorithm, made for a World. The same calls in the same order on every rank.

    Attributes:
        name: of the algorithm.
        reduce_scatter: work on a flat host array that ends with the sum over ranks in this rank's part of it. The other
            parts then hold partial sums or their old values. No rank reads this rank's array any more.
        allgather: work on a flat host array, in which each rank has filled its part. It ends with all parts.
        own: `own(count, rank)` is a rank's part of an array of `count` elements, the same answer on every rank. The
            parts of all ranks are disjoint and complete, and some may be empty.
        memory: where the arrays must be allocated; None: anywhere.
    """

    name: str
    reduce_scatter: Callable[[numpy.ndarray], Progress]
    allgather: Callable[[numpy.ndarray], Progress]
    own: Callable[[int, int], slice]
    memory: Allocator | None = None


def of_group(name: str, group: Group, reduce_scatter: Piece, allgather: Piece) -> Halves:
    """The halves of an algorithm over a group that has all ranks of its World."""

    def own(count: int, rank: int) -> slice:
        return part_of(count, group.members.index(rank), group.size)

    return Halves(name, reduce_scatter, allgather, own)
