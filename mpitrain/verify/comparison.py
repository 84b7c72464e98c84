"""The result of a comparison of two records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

# Half of the distance from 1 to the next number.
ROUNDOFFS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
KINDS = ("calls", "samples", "weights", "loss", "gradients", "learning rate", "parameters", "metrics")


@dataclass(frozen=True)
class Difference:
    """The first difference of its kind."""

    step: int
    kind: str  # one of KINDS
    text: str


@dataclass
class Comparison:
    """The result of a comparison.

    Attributes:
        num_steps: number of steps that both records have.
        dtype, tolerance: the narrowest dtype, and the tolerance that follows from it.
        differences: the first one of each kind, sorted by step and then by kind; the runs diverge at the first entry.
        largest: by kind, the largest difference among values compared with a tolerance: relative difference, step and
            name.
        counts: number of values compared, by kind.
        alone_from: the first step in which each rank has used its own gradients. From there on, several ranks do not
            compute what one computes, and only samples, weights and learning rates are compared. None: there is none.
    """

    num_steps: int
    dtype: str
    tolerance: float
    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    alone_from: int | None = None

    def judged(
        self, kind: str, step: int, name: str, relative: float, text: str, *, allowed: float | None = None
    ) -> Iterator[Difference]:
        """Count a relative difference of `name`. Yield a Difference if it exceeds `allowed` (the tolerance)."""
        self.counts[kind] += 1
        if not relative <= self.largest.get(kind, (-1.0, 0, ""))[0]:
            self.largest[kind] = (relative, step, name)
        allowed = self.tolerance if allowed is None else allowed
        if not relative <= allowed:
            text = f"{text}: the relative difference is {relative:.2g}, allowed is {allowed:.2g}"
            yield Difference(step, kind, text)


def relative(apart: float, scale: float) -> float:
    """Return the distance relative to the scale; infinity if the scale is 0 and the distance is not."""
    if apart == 0.0:
        return 0.0
    return apart / scale if scale else math.inf
