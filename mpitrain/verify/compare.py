"""Compare two records of one script, of a run on one rank and a run on several: where do they first differ?

    samples          exactly: the same ones in the same step, each equally often
    weights          exactly: their sum over the ranks
    learning rate    exactly
    loss, gradients, metrics
                     to a relative difference of sqrt(u), where u is the unit roundoff of the narrowest dtype that
                     anything was computed in: half of its digits. float32 6e-08 -> 2.4e-04; float64 -> 1.1e-08;
                     float16 -> 2.2e-02; bfloat16 -> 6.3e-02
    parameters       to the square root of that tolerance, a quarter of the digits: what each step changes in a
                     parameter, what the script changes between two steps, and the values at the beginning

Several ranks add up the same numbers in another order. In the first step, this rounding gives differences of a few u.
They grow from step to step; half of the digits leave them room to grow some thousandfold. A fault of the program shows
in the first digits instead. The difference of two losses is relative to the largest loss so far, because a loss may go
to 0. The 2-norm of the difference of two gradients is relative to the norm of the parameter's gradient or, if that is
larger, to the norm that this gradient would have if all elements of all gradients were equally large. Otherwise a
gradient that is zero up to rounding, such as that of a bias before a normalisation, would always differ. A Python
number counts as float32, because its origin is unknown.

In the rounds of LocalSGD, several ranks do not compute what one computes. From the first such step on, only samples,
weights and learning rates are compared; of that step also the loss, and the parameters that it begins with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from mpitrain.verify.comparison import KINDS, ROUNDOFFS, Comparison, Difference, relative
from mpitrain.verify.fingerprint import NUM_PROJECTIONS, Sketch, distance
from mpitrain.verify.record_file import MEAN, STEP, Line, RunRecord

# Each run rounds each parameter in several operations, and projections may give twice the real distance.
_ROUNDINGS = 8
# A ratio of changes that misses the number of ranks by less than this part counts as the number of ranks.
_ABOUT = 0.01


class ParameterChanges:
    """What each step changes in the parameters: do both runs make the same update of equal gradients?

    It has the parameters of both runs, as they were at the previous line. A change is small beside its parameter, so
    changes are compared, not values. The projections of a change are the differences of the projections of the values,
    because projections are linear.
    """

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
        """Compare the first values, and the changes by the script itself since the step before. Both count as its
        changes."""
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


def compare(alone: RunRecord, together: RunRecord, tolerance: float | None = None) -> Comparison:
    """Compare the record of a run on one rank with that of a run on several.

    Args:
        tolerance: allowed relative difference; None: it follows from the dtypes.
    """
    dtype = narrowest([*alone.lines, *together.lines])
    comparison = Comparison(
        num_steps=min(len(alone.lines), len(together.lines)),
        dtype=dtype,
        tolerance=math.sqrt(ROUNDOFFS[dtype]) if tolerance is None else tolerance,
    )
    largest_loss = 0.0
    changes = ParameterChanges(comparison, together.num_ranks)
    differences: list[Difference] = []
    for one, several in zip(alone.lines, together.lines, strict=False):
        largest_loss = max(largest_loss, abs(one.loss or 0.0), abs(several.loss or 0.0))
        differences += _calls(one, several, together.num_ranks)
        if differences and differences[-1].kind == "calls":
            break  # later lines do not correspond to each other
        differences += _samples(comparison, one, several)
        differences += _weights(comparison, one, several, together.num_ranks)
        is_same_model = comparison.alone_from is None
        if is_same_model:
            differences += _loss(comparison, one, several, largest_loss)
        if one.alone or several.alone:
            comparison.alone_from = comparison.alone_from or one.number
        if comparison.alone_from is None:
            differences += _gradients(comparison, one, several)
        if one.learning_rate is not None:
            comparison.counts["learning rate"] += 1
            if one.learning_rate != several.learning_rate:
                text = f"{one.learning_rate!r} on 1 rank, {several.learning_rate!r} on {together.num_ranks}"
                differences.append(Difference(one.number, "learning rate", text))
        if comparison.alone_from is None:
            differences += changes.compare(one, several)
            differences += _metrics(comparison, one, several)
        elif is_same_model:
            differences += changes.between(one, several)
    if len(alone.lines) != len(together.lines) and not any(one.kind == "calls" for one in differences):
        text = f"{len(alone.lines)} steps on 1 rank, {len(together.lines)} on {together.num_ranks}"
        differences.append(Difference(comparison.num_steps + 1, "calls", text))
    first: dict[str, Difference] = {}
    for difference in differences:
        first.setdefault(difference.kind, difference)
    comparison.differences = sorted(first.values(), key=lambda one: (one.step, KINDS.index(one.kind)))
    return comparison


def narrowest(lines: list[Line]) -> str:
    """Return the dtype with the largest roundoff among those that the record was computed in."""
    dtypes = {sketch["dtype"] for line in lines for sketch in line.tensors.values()}
    dtypes |= {line.precision for line in lines}
    return max(dtypes & ROUNDOFFS.keys(), key=lambda dtype: ROUNDOFFS[dtype], default="float32")


def _calls(one: Line, several: Line, num_ranks: int) -> Iterator[Difference]:
    if one.kind != several.kind:
        yield Difference(one.number, "calls", f"{one.kind} on 1 rank, {several.kind} on {num_ranks}")
        return
    for kind in ("tensors", "parameters"):
        alone, together = (
            {name: (sketch["dtype"], sketch["count"]) for name, sketch in getattr(line, kind).items()}
            for line in (one, several)
        )
        for name in [*alone, *together]:
            if alone.get(name) != together.get(name):
                here, there = (
                    f"{sizes[name][1]} elements of {sizes[name][0]}" if name in sizes else "nothing"
                    for sizes in (alone, together)
                )
                yield Difference(one.number, "calls", f"{name}: {here} on 1 rank, {there} on {num_ranks}")
                return


def _samples(comparison: Comparison, one: Line, several: Line) -> Iterator[Difference]:
    if one.samples is None or several.samples is None:
        return
    expected = [sample for seen in one.samples for sample in seen]
    used = [sample for seen in several.samples for sample in seen]
    comparison.counts["samples"] += len(expected)
    more, fewer = Counter(used) - Counter(expected), Counter(expected) - Counter(used)
    if not more and not fewer:
        return
    num_ranks = len(several.samples)
    parts = []
    if len(used) != len(expected):
        parts.append(f"{len(expected)} samples on 1 rank, {len(used)} on {num_ranks}")
        if len(used) == num_ranks * len(expected):
            parts.append("the global batch grows with the number of ranks: divide it by world.size for each rank")
    twice = [sample for sample in more if sample in expected]
    if twice:
        ranks = [rank for rank, seen in enumerate(several.samples) if twice[0] in seen]
        parts.append(
            f"{len(twice)} {_plural('sample', len(twice))} read more often than on 1 rank, such as number "
            f"{expected.index(twice[0])} (from 0) of the batch there, by {_plural('rank', len(ranks))} "
            f"{', '.join(map(str, ranks))}"
        )
    others = len(more) - len(twice)
    if others:
        parts.append(
            f"{others} {_plural('sample', others)} that the batch on 1 rank does not hold: the order differs, or the "
            "samples are changed depending on the rank (does a seed depend on the rank?)"
        )
    if fewer:
        parts.append(
            f"{sum(fewer.values())} of the batch on 1 rank read by no rank, such as number "
            f"{expected.index(next(iter(fewer)))} (from 0)"
        )
    yield Difference(one.number, "samples", "; ".join(parts))


def _weights(comparison: Comparison, one: Line, several: Line, num_ranks: int) -> Iterator[Difference]:
    if not one.weights or (one.kind == MEAN and _by_ranks(one) and _by_ranks(several)):
        return
    comparison.counts["weights"] += 1
    alone, other = math.fsum(one.weights), math.fsum(several.weights)
    if alone != other:
        text = (
            f"{alone:g} on 1 rank, {other:g} on {num_ranks} ({', '.join(f'{weight:g}' for weight in several.weights)})"
        )
        if _by_ranks(several):
            text += "; every rank has weight 1, so this is a mean over ranks, not over samples"
        yield Difference(one.number, "weights", text)


def _loss(comparison: Comparison, one: Line, several: Line, scale: float) -> Iterator[Difference]:
    if one.loss is not None and several.loss is not None:
        yield from _value(comparison, "loss", one.number, "loss", one.loss, several.loss, scale)


def _metrics(comparison: Comparison, one: Line, several: Line) -> Iterator[Difference]:
    for name in sorted({*one.metrics, *several.metrics}):
        if name not in one.metrics or name not in several.metrics:
            yield Difference(one.number, "metrics", f"only one of the runs has {name}")
            continue
        alone, other = one.metrics[name], several.metrics[name]
        yield from _value(comparison, "metrics", one.number, name, alone, other, max(abs(alone), abs(other)))


def _value(
    comparison: Comparison, kind: str, step: int, name: str, alone: float, other: float, scale: float
) -> Iterator[Difference]:
    is_equal = alone == other or (math.isnan(alone) and math.isnan(other))
    part = 0.0 if is_equal else relative(abs(alone - other), scale)
    yield from comparison.judged(kind, step, name, part, f"{name} is {alone!r} on 1 rank, {other!r} on several")


def _gradients(comparison: Comparison, one: Line, several: Line) -> Iterator[Difference]:
    norms = [max(sketch["norm"], several.tensors[name]["norm"]) for name, sketch in one.tensors.items()]
    total = math.hypot(*norms)  # its square may be too large for a float
    elements = sum(sketch["count"] for sketch in one.tensors.values())
    wrong: list[Difference] = []
    for name, sketch in one.tensors.items():
        other = several.tensors[name]
        apart = distance(sketch, other)
        scale = max(sketch["norm"], other["norm"], total * math.sqrt(sketch["count"] / max(elements, 1)))
        text = f"{name}: norm {sketch['norm']:.6g} on 1 rank, {other['norm']:.6g} on several, {apart:.2g} apart"
        wrong += comparison.judged("gradients", one.number, name, relative(apart, scale), text)
    if wrong:
        text = wrong[0].text
        if len(wrong) > 1:
            text += f"; {len(wrong)} of {len(one.tensors)} differ"
        if one.kind == MEAN and _by_ranks(several) and len(several.weights) > 1:
            text += "; every rank has weight 1: weight=len(x) gives the mean over samples"
        yield Difference(one.number, "gradients", text)


def _by_ranks(line: Line) -> bool:
    return all(weight == 1.0 for weight in line.weights)


def _plural(word: str, count: int) -> str:
    return word + "s" * (count != 1)
