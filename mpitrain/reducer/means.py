"""Means: the result of a GradientReducer's step, how much of its exchange was overlapped, and the ranks' remarks.

Remarks are what ranks tell each other at the end of a step besides gradients: parameters that they did not use, and a
note. The vote on the step carries a number that is equal on two ranks if their remarks are equal, and 0 if there are
none. The remarks themselves are gathered only if ranks differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mpitrain.errors import NonFiniteError
from mpitrain.waiting.agreement import signature
from mpitrain.world.world import World

# Indices of the parameters that one rank's loss does not depend on, in order; and its note.
Told: TypeAlias = tuple[tuple[int, ...], Any]


@dataclass(frozen=True)
class Overlap:
    """How this rank spent the time of a step.

    Attributes:
        compute_seconds: between `begin` and `finish`: the forward and the backward pass.
        exposed_seconds: in `finish`: the time by which the exchange lengthens the step.
        wire_seconds: the time with at least one bucket under way, in `finish` or before; includes the wait for slower
            ranks.
    """

    compute_seconds: float
    exposed_seconds: float
    wire_seconds: float

    @property
    def hidden(self) -> float:
        """The share of the exchange that the step did not wait for, 0 to 1."""
        return hidden_share(self.exposed_seconds, self.wire_seconds)


def hidden_share(exposed_seconds: float, wire_seconds: float) -> float:
    """Return 1 - exposed / wire, at least 0; 1 if nothing was exchanged."""
    return max(0.0, 1 - exposed_seconds / wire_seconds) if wire_seconds > 0 else 1.0


@dataclass(frozen=True)
class Remarks:
    """The remarks of the ranks with samples in one step; the same on every rank.

    Attributes:
        unused: indices of the parameters that no such rank's loss depends on.
        partly_used: indices of the parameters that the losses of some of these ranks depend on, but not of all.
        notes: the ranks' notes in rank order; a single note if all are equal.
    """

    unused: frozenset[int] = frozenset()
    partly_used: frozenset[int] = frozenset()
    notes: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Means:
    """The result of a step; bitwise identical on every rank, except for `overlap`.

    Attributes:
        loss: the weighted mean of the losses that the ranks gave to `finish`.
        weight: the sum of the ranks' weights, that is the global batch, in samples.
        overlap: this rank's times.
        cause: for a step that may be skipped: the error that `finish` would have raised if a rank's gradients hold NaN
            or infinity. The values are then not means.
        remarks: which parameters the ranks did not use, and the notes that they gave to `finish`.
        order_number: the number of the newest command to the training that any rank has heard of; 0: none.
        steps: the values that the ranks passed to `begin`, by rank.
    """

    loss: float
    weight: float
    overlap: Overlap
    cause: NonFiniteError | None = None
    remarks: Remarks = field(default_factory=Remarks)
    order_number: int = 0
    steps: Sequence[int] = ()

    @property
    def is_finite(self) -> bool:
        """False if a rank's gradients held NaN or infinity, as the means then do too."""
        return self.cause is None


class Stopwatch:
    """Measures the times of a step; only one thread at a time may call it."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def begin(self) -> None:
        """Begin a step; nothing is under way."""
        self._wire = 0.0
        self._busy_since: float | None = None
        self._begun = self._now()

    def busy(self) -> None:
        """A bucket starts."""
        if self._busy_since is None:
            self._busy_since = self._now()

    def idle(self) -> None:
        """Note that all buckets that were started have arrived."""
        if self._busy_since is not None:
            self._wire += self._now() - self._busy_since
            self._busy_since = None

    def finish(self) -> None:
        """Note that the backward pass has ended."""
        self._finishing = self._now()

    @property
    def computed(self) -> tuple[float, float]:
        """The begin and end of the forward and backward pass."""
        return self._begun, self._finishing

    def end(self) -> Overlap:
        """Note that every bucket has arrived."""
        return Overlap(self._finishing - self._begun, self._now() - self._finishing, self._wire)


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
