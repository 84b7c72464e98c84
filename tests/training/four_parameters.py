"""The parameters and gradients with which optimizers are tested."""

import math

import numpy

SHAPES = {"weight": (7, 5), "bias": (5,), "scale": (3,), "head": (5, 4)}
DECAYED = {"weight", "head"}
STEPS = 60


def ranges() -> dict[str, slice]:
    result, start = {}, 0
    for name, shape in SHAPES.items():
        result[name] = slice(start, start + math.prod(shape))
        start = result[name].stop
    return result


SIZE = max(part.stop for part in ranges().values())
DECAYED_RANGES = [part for name, part in ranges().items() if name in DECAYED]


def flat(values: dict, dtype) -> numpy.ndarray:
    return numpy.concatenate([values[name].ravel() for name in SHAPES]).astype(dtype)


def draws(seed: int) -> list[dict]:
    """The parameters, then the gradients of each step."""
    rng = numpy.random.default_rng(seed)
    return [{name: rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(STEPS + 1)]
