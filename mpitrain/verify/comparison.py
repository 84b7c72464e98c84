"""What a comparison of two records has found."""

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
    """The first one of its kind."""

    step: int
    kind: str  # one of KINDS
    text: str


@dataclass
class Comparison:
    """What was found.

    Attributes:
        num_steps: how many steps both records have.
        dtype, tolerance: the narrowest dtype, and what follows from it.
        differences: the first one of each kind, by step and then by kind: the first of them is where it begins.
        largest: of the values that are compared with a tolerance, by kind: relative difference, step and name.
        counts: how many values of each kind were compared.
    """

    num_steps: int
    dtype: str
    tolerance: float
    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def judged(
        self, kind: str, step: int, name: str, relative: float, text: str, *, allowed: float | None = None
    ) -> Iterator[Difference]:
        """Count a relative difference of `name`. More than `allowed`, which is the tolerance, is a Difference."""
        self.counts[kind] += 1
        if not relative <= self.largest.get(kind, (-1.0, 0, ""))[0]:
            self.largest[kind] = (relative, step, name)
        allowed = self.tolerance if allowed is None else allowed
        if not relative <= allowed:
            text = f"{text}: a relative difference of {relative:.2g}, allowed is {allowed:.2g}"
            yield Difference(step, kind, text)


def relative(apart: float, scale: float) -> float:
    """The part that a distance is of a size; infinite where there is no size."""
    if apart == 0.0:
        return 0.0
    return apart / scale if scale else math.inf
