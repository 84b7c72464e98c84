"""Compare what each step changes in the parameters: do both runs make the same update of equal gradients?

A change is small beside its parameter, so this module compares changes, not values. The projections of a change are
the differences of the projections of the values, because projections are linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpitrain.verify.comparison import ROUNDOFFS, Comparison, Difference, relative
from mpitrain.verify.fingerprint import NUM_PROJECTIONS, Sketch, distance
from mpitrain.verify.record_file import STEP, Line

# Each run rounds each parameter in several operations, and projections may give twice the real distance.
_ROUNDINGS = 8
# A ratio of changes that misses the number of ranks by less than this part counts as the number of ranks.
_ABOUT = 0.01


class ParameterChanges:
    """The parameters of both runs, as they were at the previous line."""

    def __init__(self, comparison: Comparison, num_ranks: int) -> None:
        """`num_ranks` is the number of ranks of the run on several."""
        self._comparison = comparison
        self._num_ranks = num_ranks
        # An optimizer that divides by the size of a gradient enlarges rounding where the gradient is small.
        self._allowed = max(math.sqrt(comparison.tolerance), comparison.tolerance)
        self._earlier: tuple[dict[str, Sketch], dict[str, Sketch]] = ({}, {})
        self._left_out: set[str] = set()
        # Numbers of elements: in a loop of the script's own, parameters and means may have other names.
        self._left_out_counts: set[int] = set()

    def compare(self, one: Line, several: Line) -> Iterator[Difference]:
        """Yield what differs in the next lines of both runs."""
        yield from self.between(one, several)
        unlike = {name for name in one.tensors if self._is_unlike(one.tensors[name], several.tensors[name])}
        self._left_out |= unlike
        if not one.parameters:
            self._left_out_counts |= {one.tensors[name]["count"] for name in unlike}
        wrong: list[Difference] = []
        for name in one.parameters:
            if self._is_known(name) and not self._is_left_out(name, one.parameters[name]):
                wrong += self._changes(one.number, name, (one.parameters[name], several.parameters[name]), "changed")
        if wrong:
            more = f"; {len(wrong)} of {len(one.parameters)} differ" if len(wrong) > 1 else ""
            yield Difference(one.number, "parameters", wrong[0].text + more)
        for earlier, line in zip(self._earlier, (one, several), strict=True):
            earlier.update(line.parameters)

    def between(self, one: Line, several: Line) -> Iterator[Difference]:
        """Compare first values, and what the script itself has changed since the step before. Both count as its."""
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
        """Return whether the gradients differ too much to judge the update: small gradients may be mostly rounding."""
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
        # This form counts NaN as a difference.
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
