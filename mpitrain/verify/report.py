"""What a comparison has found, in lines for a person."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.verify.compare import KINDS, Comparison
from mpitrain.verify.record import STEP, Record


def report(alone: Record, together: Record, its: Comparison) -> Iterator[str]:
    """What the comparison says, line by line."""
    has_steps = any(line.kind == STEP for line in (*alone.lines, *together.lines))
    unit, tensors = ("step", "gradients") if has_steps else ("call", "results")
    units = "steps" if has_steps else "calls of world.mean or world.sum"
    allowed = f"allowed relative difference {its.tolerance:.2g} (from {its.dtype})"
    yield f"1 rank and {together.num_ranks}, {its.num_steps} {units}; {allowed}"
    names = {kind: tensors if kind == "gradients" else kind for kind in KINDS}
    first = {difference.kind: difference for difference in its.differences}
    for kind in KINDS[1:]:
        yield f"  {names[kind]:<14} {f'differ in {unit} {first[kind].step}' if kind in first else _equal(its, kind)}"
    for number, difference in enumerate(its.differences):
        begin = "then" if number else "first difference"
        yield f"{begin}: {unit} {difference.step}, {names[difference.kind]}: {difference.text}"


def _equal(its: Comparison, kind: str) -> str:
    if not its.counts[kind]:
        return "not seen"
    if kind not in its.largest:
        return f"{its.counts[kind]} values, the same"
    relative, step, which = its.largest[kind]
    where = f", in step {step}, {which}" if relative else ""
    return f"{its.counts[kind]} values, largest relative difference {relative:.2g}{where}"
