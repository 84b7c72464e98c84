"""What all ranks have in training with rounds, by float64 loops over all samples, without a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, DiLoCo, LocalSGD, StreamingDiLoCo
from mpitrain.optim import SGD
from mpitrain.state.names import split
from mpitrain.strategies import Strategy

from .test_strategies import MOMENTUM, RATE, WIDTH, adapter, count_of, samples, values

EVERY, STEPS = 3, 8  # two rounds, and two steps of the third
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


def streaming(fragments: int, delay: int, alpha: float) -> StreamingDiLoCo:
    outer = SGD(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    return StreamingDiLoCo(EVERY, fragments=fragments, delay=delay, alpha=alpha, outer=outer)


# By name: a strategy; its fragments, delay and alpha.
KINDS: dict[str, tuple[Callable[[], Strategy], int, int, float]] = {
    "local_sgd": (lambda: LocalSGD(EVERY), 1, 0, 0.0),
    "diloco": (lambda: DiLoCo(EVERY, outer=SGD(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)), 1, 0, 0.0),
    "parts": (lambda: streaming(4, 0, 0.0), 4, 0, 0.0),
    "one late": (lambda: streaming(1, 1, 0.25), 1, 1, 0.25),
    "parts, late": (lambda: streaming(3, 2, 0.25), 3, 2, 0.25),
    "parts, as late as possible": (lambda: streaming(2, EVERY, 0.0), 2, EVERY, 0.0),
}
# Of the others, CI has what they are made of.
DEAR = ("parts", "one late")
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.nightly if kind in DEAR else ()) for kind in KINDS]
)


def flat(model: ArrayFunction) -> numpy.ndarray:
    return numpy.concatenate([value.ravel() for value in values(model)])


class Expected:
    """What all ranks have, by a loop over their samples. Vectors have the elements of w and then those of v."""

    def __init__(self, size: int, kind: str) -> None:
        _, fragments, self.delay, self.alpha = KINDS[kind]
        self.size, self.is_mean = size, kind == "local_sgd"
        self.common = flat(adapter())
        self.outer, self.steps = 0 * self.common, 0
        self.own = [self.common.copy() for _ in range(size)]
        self.speeds = [0 * self.common for _ in range(size)]
        count = len(self.common)
        self.parts = [slice(count * one // fragments, count * (one + 1) // fragments) for one in range(fragments)]
        self.offsets = [math.ceil(EVERY * one / fragments) for one in range(1, fragments + 1)]
        self.counts = [[0] * size for _ in range(fragments)]
        # Of each fragment that is under way: when it arrives, the mean, and the samples by rank.
        self.sent: list[tuple[int, numpy.ndarray, list[int]] | None] = [None] * fragments

    def step(self) -> float:
        """Make a step. Return its mean loss."""
        if self.delay:
            self.send((self.steps - 1) % EVERY + 1)
        total, number = 0.0, 0
        for rank in range(self.size):
            x = samples(rank, self.steps, count_of(rank, self.steps, self.size))
            total, number = total + self.inner(rank, x), number + len(x)
        self.step_ends()
        return total / number

    def step_ends(self) -> None:
        self.steps += 1
        if not self.delay:
            self.send((self.steps - 1) % EVERY + 1)
        for part, sent in enumerate(self.sent):
            if sent and sent[0] == self.steps:
                self.arrive(part, self.alpha)

    def inner(self, rank: int, x: numpy.ndarray) -> float:
        """Make an inner step of a rank. Return the sum of its losses."""
        own = self.own[rank]
        w, v = own[:WIDTH], own[WIDTH:]
        gradient = numpy.concatenate([w - x.mean(axis=0), v - x.mean()]) if len(x) else 0 * own
        self.speeds[rank] = MOMENTUM * self.speeds[rank] + gradient
        self.own[rank] = own - RATE / (1 + self.steps) * self.speeds[rank]
        for counts in self.counts:
            counts[rank] += len(x)
        return float(((w - x) ** 2).sum() / 2)

    def send(self, steps: int | None) -> None:
        """Send the fragments that are due, or all."""
        for part, where in enumerate(self.parts):
            counts = self.counts[part]
            if steps in (None, self.offsets[part]) and sum(counts):
                gone = [count * (self.common - own)[where] for count, own in zip(counts, self.own, strict=True)]
                self.sent[part] = self.steps + self.delay, sum(gone) / sum(counts), counts
                self.counts[part] = [0] * len(counts)

    def arrive(self, part: int, alpha: float) -> None:
        sent, where = self.sent[part], self.parts[part]
        assert sent
        mean, self.sent[part] = sent[1], None
        if self.is_mean:
            self.common[where] -= mean
        else:
            self.outer[where] = OUTER_MOMENTUM * self.outer[where] + mean
            self.common[where] -= OUTER_RATE * (mean + OUTER_MOMENTUM * self.outer[where])
        for own in self.own:
            own[where] = alpha * own[where] + (1 - alpha) * self.common[where]

    def take_back(self) -> None:
        """Forget what is under way."""
        for part, sent in enumerate(self.sent):
            if sent:
                self.counts[part] = [one + other for one, other in zip(self.counts[part], sent[2], strict=True)]
                self.sent[part] = None

    def end(self) -> None:
        """Send all that the ranks have gone since each fragment has arrived last."""
        self.take_back()
        self.send(None)
        for part, sent in enumerate(self.sent):
            if sent:
                self.arrive(part, 0.0)

    def add_rank(self) -> None:
        """One more rank begins with the common parameters, and the optimizer of rank 0; the others stay as they are."""
        self.take_back()
        for counts in self.counts:
            counts.append(0)
        self.own.append(self.common.copy())
        self.speeds.append(self.speeds[0].copy())


def assert_close(found: numpy.ndarray, expected: numpy.ndarray) -> None:
    numpy.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def all_bits(strategy: Strategy, model: ArrayFunction) -> dict[str, Any]:
    """All that a rank has: of its model, in common, and to send."""
    own = strategy.own_state()
    whole = {"model": model.state(), "state": strategy.state(), "own": own}
    return {
        name: value.tobytes() if isinstance(value, numpy.ndarray) else value
        for part in split(whole)
        for name, value in part.items()
    }
