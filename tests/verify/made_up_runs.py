"""Made-up runs for the tests of verify."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy

from mpitrain.verify.comparison import Comparison
from mpitrain.verify.fingerprint import Sketch, sketch
from mpitrain.verify.record_file import STEP, Line, RunRecord

WEIGHT = numpy.random.default_rng(0).standard_normal((30, 20)).astype("float32")


BIAS = numpy.random.default_rng(1).standard_normal(20).astype("float32")


def parameters(number: int) -> dict[str, Sketch]:
    """The parameters after so many steps. Each step subtracts a hundredth of the gradients."""
    changes = [numpy.float32(0.01) * WEIGHT * step for step in range(1, number + 1)]
    return {"w": sketch("w", WEIGHT - sum(changes)), "b": sketch("b", BIAS - numpy.float32(0.01 * number) * BIAS)}


def line(number: int, ranks: list[list[str]], **other: Any) -> Line:
    usual = {
        "number": number,
        "kind": STEP,
        "samples": ranks,
        "weights": [float(len(seen)) for seen in ranks],
        "tensors": {"w": sketch("w", WEIGHT * number), "b": sketch("b", BIAS)},
        "precision": "float32",
        "loss": 1.0 / number,
        "learning_rate": 0.1,
        "metrics": {"accuracy": 0.5} if number == 3 else {},
        "before": parameters(0) if number == 1 else {},
        "parameters": parameters(number),
    }
    return Line(**{**usual, **other})


def records(at: int = 0, **other: Any) -> tuple[RunRecord, RunRecord]:
    """Three steps of four samples on 1 rank and on 2. They differ only by `other` in step `at` on 2 ranks."""
    samples = [["a", "b", "c", "d"], ["e", "f", "g", "h"], ["i", "j", "k", "l"]]
    alone = [line(number, [its]) for number, its in enumerate(samples, 1)]
    together = [line(number, [its[:3], its[3:]]) for number, its in enumerate(samples, 1)]
    if at:
        together[at - 1] = dataclasses.replace(together[at - 1], **other)
    return RunRecord(1, tuple(alone)), RunRecord(2, tuple(together))


def only(its: Comparison) -> tuple[int, str, str]:
    (found,) = its.differences
    return found.step, found.kind, found.text


def changed(name: str, number: int, factor: float) -> dict[str, Sketch]:
    """Like `parameters`, but this step has changed one of them by so much more."""
    value, change = {"w": (WEIGHT, 0.01 * number * WEIGHT), "b": (BIAS, 0.01 * BIAS)}[name]
    steps = number * (number - 1) / 2 if name == "w" else number - 1
    earlier = value.astype(float) * (1 - 0.01 * steps)
    return parameters(number) | {name: sketch(name, (earlier - factor * change).astype("float32"))}
