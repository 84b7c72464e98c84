"""Two records of one script, of a run on one rank and one on several: where do they first differ?

    samples          exactly: the same ones in the same step, each as often
    weights          exactly: their sum over the ranks
    learning rate    exactly
    loss, gradients, metrics
                     to a relative difference of sqrt(u), where u is the unit roundoff of the narrowest dtype that
                     anything was computed in: half of its digits. float32 5e-08 -> 2.4e-04; float64 -> 1.1e-08;
                     float16 -> 2.2e-02; bfloat16 -> 6.3e-02

Rounding alone gives differences of a few u in the first step, since sums are added up in another order, and they grow
from step to step; half of the digits leave them room for some thousand times as much. What is wrong in the program,
rather, shows in the first digits. A loss is compared with the largest loss so far, for it may go to 0. A gradient is
compared by the 2-norm of the difference with the norm of the parameter's gradient or, where that is larger, with the
norm it would have if all elements of all gradients were of one size: a gradient that is zero but for rounding, as that
of a bias before a normalisation, would else be all difference. A Python number counts as float32, since nobody knows
what it was computed from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mpitrain.verify.fingerprint import distance
from mpitrain.verify.record import MEAN, Line, Record

# Half of the distance from 1 to the next number.
ROUNDOFFS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
KINDS = ("calls", "samples", "weights", "loss", "gradients", "learning rate", "metrics")


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


def compare(alone: Record, together: Record, tolerance: float | None = None) -> Comparison:
    """Compare the record of a run on one rank with that of a run on several.

    Args:
        tolerance: relative, instead of the one that follows from the dtypes.
    """
    dtype = narrowest([*alone.lines, *together.lines])
    its = Comparison(
        num_steps=min(len(alone.lines), len(together.lines)),
        dtype=dtype,
        tolerance=math.sqrt(ROUNDOFFS[dtype]) if tolerance is None else tolerance,
    )
    largest_loss = 0.0
    found: list[Difference] = []
    for one, several in zip(alone.lines, together.lines, strict=False):
        largest_loss = max(largest_loss, abs(one.loss or 0.0), abs(several.loss or 0.0))
        found += _calls(one, several, together.num_ranks)
        if found and found[-1].kind == "calls":
            break  # what follows does not belong together
        found += _samples(its, one, several)
        found += _weights(its, one, several, together.num_ranks)
        found += _loss(its, one, several, largest_loss)
        found += _gradients(its, one, several)
        if one.learning_rate is not None:
            its.counts["learning rate"] += 1
            if one.learning_rate != several.learning_rate:
                text = f"{one.learning_rate!r} on 1 rank, {several.learning_rate!r} on {together.num_ranks}"
                found.append(Difference(one.number, "learning rate", text))
        found += _metrics(its, one, several)
    if len(alone.lines) != len(together.lines) and not any(one.kind == "calls" for one in found):
        text = f"{len(alone.lines)} steps on 1 rank, {len(together.lines)} on {together.num_ranks}"
        found.append(Difference(its.num_steps + 1, "calls", text))
    first: dict[str, Difference] = {}
    for difference in found:
        first.setdefault(difference.kind, difference)
    its.differences = sorted(first.values(), key=lambda one: (one.step, KINDS.index(one.kind)))
    return its


def narrowest(lines: list[Line]) -> str:
    """The dtype with the largest roundoff that anything in the record was computed in."""
    dtypes = {sketch["dtype"] for line in lines for sketch in line.tensors.values()}
    dtypes |= {line.precision for line in lines}
    return max(dtypes & ROUNDOFFS.keys(), key=lambda dtype: ROUNDOFFS[dtype], default="float32")


def _calls(one: Line, several: Line, num_ranks: int) -> Iterator[Difference]:
    mine, others = (
        {name: (sketch["dtype"], sketch["count"]) for name, sketch in line.tensors.items()} for line in (one, several)
    )
    if one.kind != several.kind:
        yield Difference(one.number, "calls", f"{one.kind} on 1 rank, {several.kind} on {num_ranks}")
    elif mine != others:
        name = next(name for name in [*mine, *others] if mine.get(name) != others.get(name))
        here, there = (
            f"{its[name][1]} elements of {its[name][0]}" if name in its else "nothing" for its in (mine, others)
        )
        yield Difference(one.number, "calls", f"{name}: {here} on 1 rank, {there} on {num_ranks}")


def _samples(its: Comparison, one: Line, several: Line) -> Iterator[Difference]:
    if one.samples is None or several.samples is None:
        return
    expected = [sample for seen in one.samples for sample in seen]
    found = [sample for seen in several.samples for sample in seen]
    its.counts["samples"] += len(expected)
    more, fewer = Counter(found) - Counter(expected), Counter(expected) - Counter(found)
    if not more and not fewer:
        return
    num_ranks = len(several.samples)
    parts = []
    if len(found) != len(expected):
        parts.append(f"{len(expected)} samples on 1 rank, {len(found)} on {num_ranks}")
        if len(found) == num_ranks * len(expected):
            parts.append("the global batch grows with the number of ranks: divide it by world.size for each rank")
    twice = [sample for sample in more if sample in expected]
    if twice:
        who = [rank for rank, seen in enumerate(several.samples) if twice[0] in seen]
        parts.append(
            f"{len(twice)} {_plural('sample', len(twice))} read more often than on 1 rank, such as number "
            f"{expected.index(twice[0])} (from 0) of the batch there, by {_plural('rank', len(who))} "
            f"{', '.join(map(str, who))}"
        )
    others = len(more) - len(twice)
    if others:
        parts.append(
            f"{others} {_plural('sample', others)} that the batch on 1 rank does not hold: another order, or changes "
            "that depend on the rank (a seed with the rank in it?)"
        )
    if fewer:
        parts.append(
            f"{sum(fewer.values())} of the batch on 1 rank read by no rank, such as number "
            f"{expected.index(next(iter(fewer)))} (from 0)"
        )
    yield Difference(one.number, "samples", "; ".join(parts))


def _weights(its: Comparison, one: Line, several: Line, num_ranks: int) -> Iterator[Difference]:
    if not one.weights or (one.kind == MEAN and _by_ranks(one) and _by_ranks(several)):
        return
    its.counts["weights"] += 1
    mine, other = math.fsum(one.weights), math.fsum(several.weights)
    if mine != other:
        text = (
            f"{mine:g} on 1 rank, {other:g} on {num_ranks} ({', '.join(f'{weight:g}' for weight in several.weights)})"
        )
        if _by_ranks(several):
            text += "; every rank has weight 1, so this is a mean by ranks and not by samples"
        yield Difference(one.number, "weights", text)


def _loss(its: Comparison, one: Line, several: Line, scale: float) -> Iterator[Difference]:
    if one.loss is not None and several.loss is not None:
        yield from _value(its, "loss", one.number, "loss", one.loss, several.loss, scale)


def _metrics(its: Comparison, one: Line, several: Line) -> Iterator[Difference]:
    for name in sorted({*one.metrics, *several.metrics}):
        if name not in one.metrics or name not in several.metrics:
            yield Difference(one.number, "metrics", f"{name} is there in one of the runs only")
            continue
        mine, other = one.metrics[name], several.metrics[name]
        yield from _value(its, "metrics", one.number, name, mine, other, max(abs(mine), abs(other)))


def _value(
    its: Comparison, kind: str, step: int, name: str, mine: float, other: float, scale: float
) -> Iterator[Difference]:
    its.counts[kind] += 1
    if mine == other or (math.isnan(mine) and math.isnan(other)):
        relative = 0.0
    else:
        relative = abs(mine - other) / scale if scale else math.inf
    yield from _judged(its, kind, step, name, relative, f"{name} is {mine!r} on 1 rank, {other!r} on several")


def _gradients(its: Comparison, one: Line, several: Line) -> Iterator[Difference]:
    norms = [max(mine["norm"], several.tensors[name]["norm"]) for name, mine in one.tensors.items()]
    total = math.sqrt(math.fsum(norm**2 for norm in norms))
    elements = sum(sketch["count"] for sketch in one.tensors.values())
    wrong: list[Difference] = []
    for name, mine in one.tensors.items():
        other = several.tensors[name]
        its.counts["gradients"] += 1
        apart = distance(mine, other)
        scale = max(mine["norm"], other["norm"], total * math.sqrt(mine["count"] / max(elements, 1)))
        relative = apart / scale if apart else 0.0
        text = f"{name}: norm {mine['norm']:.6g} on 1 rank, {other['norm']:.6g} on several, {apart:.2g} apart"
        wrong += _judged(its, "gradients", one.number, name, relative, text)
    if wrong:
        text = wrong[0].text
        if len(wrong) > 1:
            text += f"; so do {len(wrong) - 1} more of {len(one.tensors)}"
        if one.kind == MEAN and _by_ranks(several) and len(several.weights) > 1:
            text += "; every rank has weight 1: with weight=len(x) it is the mean over samples"
        yield Difference(one.number, "gradients", text)


def _judged(its: Comparison, kind: str, step: int, name: str, relative: float, text: str) -> Iterator[Difference]:
    if not relative <= its.largest.get(kind, (-1.0, 0, ""))[0]:
        its.largest[kind] = (relative, step, name)
    if not relative <= its.tolerance:
        yield Difference(step, kind, f"{text}: a relative difference of {relative:.2g}, allowed is {its.tolerance:.2g}")


def _by_ranks(line: Line) -> bool:
    return all(weight == 1.0 for weight in line.weights)


def _plural(word: str, count: int) -> str:
    return word + "s" * (count != 1)
