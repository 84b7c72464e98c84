"""The result of a comparison as lines for the user."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.verify.comparison import KINDS, Comparison, Difference
from mpitrain.verify.record_file import STEP, RunRecord


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
            f"  from step {comparison.alone_from} on, each rank trains by itself, and no step is meant to equal that "
            "of 1 rank: only samples, weights and learning rates are compared, and the loss of that step"
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
