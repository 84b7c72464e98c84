"""A small model of NumPy layers, the same model worked out in one process without mpitrain, and its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy

from mpitrain import ArrayLayers, Parts, Pipeline, World
from mpitrain.arrays import Array
from mpitrain.data import ArrayData
from mpitrain.optim import SGD
from mpitrain.strategies import Strategy

WIDTHS = [5, 6, 4, 7, 5, 6, 3]  # of the inputs, and of the outputs of each layer
LAYERS = len(WIDTHS) - 1
RATE, MOMENTUM, CLIP = 0.1, 0.9, 0.2


def initial(number: int) -> dict[str, numpy.ndarray]:
    rng = numpy.random.default_rng((5, number))
    shape = WIDTHS[number], WIDTHS[number + 1]
    return {"weight": rng.standard_normal(shape) / 2, "bias": rng.standard_normal(shape[1]) / 2}


class Dense:
    """tanh(x weight + bias)."""

    def __init__(self, number: int) -> None:
        self.number = number

    def parameters(self) -> dict[str, numpy.ndarray]:
        return initial(self.number)

    def forward(self, parameters: Mapping[str, Array], inputs: Array) -> tuple[Array, Any]:
        output = numpy.tanh(inputs @ parameters["weight"] + parameters["bias"])
        return output, (inputs, output)

    def backward(
        self, parameters: Mapping[str, Array], kept: Any, gradient: Array
    ) -> tuple[Array | None, dict[str, Array]]:
        inputs, output = kept
        inner = gradient * (1 - output * output)
        return inner @ parameters["weight"].T, {"weight": inputs.T @ inner, "bias": inner.sum(axis=0)}


def square(output: Array, targets: Any) -> tuple[float, Array]:
    """Half the squared distance, as the mean over the samples."""
    return float(((output - targets) ** 2).sum() / 2 / len(output)), (output - targets) / len(output)


def samples(count: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    rng = numpy.random.default_rng(3)
    return rng.standard_normal((count, WIDTHS[0])), rng.standard_normal((count, WIDTHS[-1]))


def layered(layers: Any = None) -> ArrayLayers:
    return ArrayLayers(
        layers or [Dense(n) for n in range(LAYERS)], square, SGD(RATE, momentum=MOMENTUM, clip_norm=CLIP)
    )


def builder(
    count: int, global_batch: int, strategy: Callable[[], Strategy], layers: Any = None
) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        made = strategy()
        replicas = made.replicas(world) if isinstance(made, Pipeline) else world
        data = ArrayData(replicas, samples(count), global_batch=global_batch, shuffle=False)
        return Parts(layered(layers), made, data)

    return build


def plain(count: int, global_batch: int, steps: int) -> tuple[dict[str, numpy.ndarray], list[float]]:
    """Train in one process, in float64, without mpitrain. Return the parameters and the losses."""
    w = {f"{n}.{name}": value for n in range(LAYERS) for name, value in initial(n).items()}
    speed = {name: numpy.zeros_like(value) for name, value in w.items()}
    x, y = samples(count)
    losses, begin = [], 0
    for _ in range(steps):
        part = slice(begin, min(begin + global_batch, count))
        begin = 0 if part.stop == count else part.stop
        values = [x[part]]
        for n in range(LAYERS):
            values.append(numpy.tanh(values[-1] @ w[f"{n}.weight"] + w[f"{n}.bias"]))
        losses.append(float(((values[-1] - y[part]) ** 2).sum() / 2 / len(values[0])))
        gradient, gradients = (values[-1] - y[part]) / len(values[0]), {}
        for n in reversed(range(LAYERS)):
            inner = gradient * (1 - values[n + 1] ** 2)
            gradients[f"{n}.weight"], gradients[f"{n}.bias"] = values[n].T @ inner, inner.sum(axis=0)
            gradient = inner @ w[f"{n}.weight"].T
        norm = numpy.sqrt(sum((one**2).sum() for one in gradients.values()))
        for name, one in gradients.items():
            speed[name] = MOMENTUM * speed[name] + one * min(1.0, CLIP / norm)
            w[name] = w[name] - RATE * speed[name]
    return w, losses
