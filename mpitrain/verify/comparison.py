"""The result of a comparison of two records, and its lines for the user."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mpitrain.verify.record_file import STEP, RunRecord

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


def report(alone: RunRecord, together: RunRecord, comparison: Comparison) -> Iterator[str]:
    """Yield the report line by line."""
    has_steps = any(line.kind == STEP for line in (*alone.lines, *together.lines))
    unit, tensors = ("step", "gradients") if has_steps else ("call", "results")
    units = "steps" if has_steps else "calls of world.mean or world.sum"
    allowed = f"allowed relative difference {comparison.tolerance:.2g} (from {comparison.dtype})"
    yield f"1 rank and {together.num_ranks}, {comparison.num_steps} {units}; {allowed}"
    names = {kind: tensors if kind == "gradients" else kind for kind in KINDS}
    first = {difference.kind: difference for difference in comparison.differences}
    for kind in KINDS[1:]:
        verdict = f"differ {_when(unit, first[kind])}" if kind in first else _equal(comparison, kind)
        yield f"  {names[kind]:<14} {verdict}"
    if comparison.alone_from is not None:
        yield (
            f"  from step {comparison.alone_from} on, each rank trains by itself, so its steps differ from "
            "those of 1 rank: only samples, weights and learning rates are compared, and the loss of that "
            "step"
        )
    for number, difference in enumerate(comparison.differences):
        begin = "then" if number else "first difference"
        yield f"{begin}: {_when(unit, difference).removeprefix('in ')}, {names[difference.kind]}: {difference.text}"


def _when(unit: str, difference: Difference) -> str:
    return f"in {unit} {difference.step}" if difference.step else f"before the first {unit}"


def _equal(comparison: Comparison, kind: str) -> str:
    if not comparison.counts[kind]:
        return "not seen"
    if kind not in comparison.largest:
        return f"{comparison.counts[kind]} values, the same"
    relative, step, name = comparison.largest[kind]
    where = f", in step {step}, {name}" if relative else ""
    return f"{comparison.counts[kind]} values, largest relative difference {relative:.2g}{where}"
