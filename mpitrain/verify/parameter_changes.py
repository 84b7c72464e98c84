"""What each step changes in the parameters, compared: whether both runs make the same of equal gradients.

A change is small beside its parameter, so changes are compared, and not the values. Their projections are the
differences of those of the values, for projections are linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpitrain.verify.comparison import ROUNDOFFS, Comparison, Difference, relative
from mpitrain.verify.fingerprint import NUM_PROJECTIONS, Sketch, distance
from mpitrain.verify.record_file import STEP, Line

# Each run rounds each parameter, in some operations; and a distance from projections may be twice as large as it is.
_ROUNDINGS = 8
# By how much a ratio of changes may miss the number of ranks, and still be said to be it.
_ABOUT = 0.01


class ParameterChanges:
    """The parameters of both runs, as they were at the line before."""

    def __init__(self, comparison: Comparison, num_ranks: int) -> None:
        """`num_ranks` is of the run on several."""
        self._comparison = comparison
        self._num_ranks = num_ranks
        # An optimizer that divides by the size of a gradient makes more of what rounding leaves of small ones.
        self._allowed = max(math.sqrt(comparison.tolerance), comparison.tolerance)
        self._earlier: tuple[dict[str, Sketch], dict[str, Sketch]] = ({}, {})
        self._left_out: set[str] = set()
        # Numbers of elements: in a loop of the script's own, parameters and means may have other names.
        self._left_out_counts: set[int] = set()

    def compare(self, one: Line, several: Line) -> Iterator[Difference]:
        """What differs in the next lines of both runs."""
        yield from self._between(one, several)
        unlike = {name for name in one.tensors if self._is_unlike(one.tensors[name], several.tensors[name])}
        self._left_out |= unlike
        if not one.parameters:
            self._left_out_counts |= {one.tensors[name]["count"] for name in unlike}
        wrong: list[Difference] = []
        for name in one.parameters:
            if self._is_known(name) and not self._is_left_out(name, one.parameters[name]):
                wrong += self._changes(one.number, name, (one.parameters[name], several.parameters[name]), "changed")
        if wrong:
            more = f"; so do {len(wrong) - 1} more of {len(one.parameters)}" if len(wrong) > 1 else ""
            yield Difference(one.number, "parameters", wrong[0].text + more)
        for earlier, line in zip(self._earlier, (one, several), strict=True):
            earlier.update(line.parameters)

    def _between(self, one: Line, several: Line) -> Iterator[Difference]:
        """What the script itself has changed since the step before, and first values; both count as of that step."""
        lines, before = (one, several), one.number - 1
        for name in {**one.before, **several.before}:
            values = [
                line.before.get(name) or earlier.get(name) for line, earlier in zip(lines, self._earlier, strict=True)
            ]
            alone, together = values
            if alone is None or together is None or alone["count"] != together["count"]:
                continue
            if self._is_left_out(name, alone):
                continue
            if self._is_known(name):
                unit = "step" if one.kind == STEP else "call"
                yield from self._changes(before, name, (alone, together), f"changed before {unit} {one.number} began")
            else:
                norms = f"norm {alone['norm']:.6g} on 1 rank, {together['norm']:.6g} on several"
                part = relative(distance(alone, together), max(alone["norm"], together["norm"]))
                yield from self._comparison.judged("parameters", before, name, part, f"{name} began with {norms}")
        for earlier, line in zip(self._earlier, lines, strict=True):
            earlier.update(line.before)

    def _is_known(self, name: str) -> bool:
        return all(name in earlier for earlier in self._earlier)

    def _is_left_out(self, name: str, value: Sketch) -> bool:
        return name in self._left_out or value["count"] in self._left_out_counts

    def _is_unlike(self, gradient: Sketch, other: Sketch) -> bool:
        """Whether nothing follows from what becomes of it: it is small beside others, and much of it is rounding."""
        return not distance(gradient, other) <= self._comparison.tolerance * max(gradient["norm"], other["norm"])

    def _changes(self, step: int, name: str, values: tuple[Sketch, Sketch], word: str) -> Iterator[Difference]:
        changes = [
            [new - old for new, old in zip(value["projections"], earlier[name]["projections"], strict=True)]
            for value, earlier in zip(values, self._earlier, strict=True)
        ]
        alone, several = (_size(change) for change in changes)
        apart = _size([new - old for new, old in zip(*changes, strict=True)])
        roundoff = ROUNDOFFS.get(values[0]["dtype"], 0.0)
        rounding = _ROUNDINGS * roundoff * max(value["norm"] for value in values)
        # Written so that NaN is a difference.
        part = 0.0 if apart <= rounding else relative(apart, max(alone, several))
        text = f"{name}: {word} by {alone:.6g} on 1 rank, by {several:.6g} on several, {apart:.2g} apart"
        for difference in self._comparison.judged("parameters", step, name, part, text, allowed=self._allowed):
            yield Difference(step, difference.kind, difference.text + self._hint(alone, several))

    def _hint(self, alone: float, several: float) -> str:
        for more, less, word in ((several, alone, "multiplied"), (alone, several, "divided")):
            if self._num_ranks > 1 and abs(more - self._num_ranks * less) <= _ABOUT * more:
                return f"; {word} by {self._num_ranks}, the number of ranks: is world.size in the update?"
        return ""


def _size(projections: list[float]) -> float:
    return math.hypot(*projections) / math.sqrt(NUM_PROJECTIONS)
