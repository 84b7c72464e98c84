"""What ranks tell each other at the end of a step besides gradients: parameters that they did not use, and a note.

The vote on the step carries a number. It is equal on two ranks if they tell the same, and 0 if they tell nothing. The
remarks themselves are gathered only if ranks differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mpitrain.waiting.agreement import signature
from mpitrain.world import World

# Indices of the parameters that one rank's loss does not depend on, in order; and its note.
Told: TypeAlias = tuple[tuple[int, ...], Any]


@dataclass(frozen=True)
class Remarks:
    """What the ranks with samples told in one step; the same on every rank.

    Attributes:
        unused: indices of the parameters that no such rank's loss depends on.
        partly_used: indices of the parameters that the loss of some of these ranks depends on, and of others not.
        notes: the ranks' notes in rank order; a single note if all are equal.
    """

    unused: frozenset[int] = frozenset()
    partly_used: frozenset[int] = frozenset()
    notes: tuple[Any, ...] = ()


def mark_of(told: Told) -> int:
    """Return a number of 63 bits for the vote; 0 if there is nothing to tell."""
    unused, note = told
    return signature("remarks", [repr(told)]) >> 1 if unused or note is not None else 0


def remarks_of(told: Sequence[Told]) -> Remarks:
    """Make the remarks of the ranks with samples, one or more."""
    everywhere = frozenset(told[0][0]).intersection(*(unused for unused, _ in told))
    somewhere = frozenset(index for unused, _ in told for index in unused)
    return Remarks(everywhere, somewhere - everywhere, tuple(note for _, note in told))


def gather_remarks(world: World, told: Told, marks: Sequence[int] | None, weights: Sequence[float]) -> Remarks:
    """Return all ranks' remarks. Collective if the marks differ.

    Args:
        told: what this rank tells.
        marks: the marks of all ranks, by rank, from `mark_of`; None if they did not arrive, on every rank.
        weights: the weights of all ranks, by rank: remarks of a rank without samples do not count.
    """
    if marks is not None:
        if not any(mark for mark, weight in zip(marks, weights, strict=True) if weight):
            return Remarks(notes=(None,))
        if all(mark == marks[0] for mark in marks):
            return remarks_of([told])
    of_all = world.allgather(told)
    return remarks_of([one for one, weight in zip(of_all, weights, strict=True) if weight])
