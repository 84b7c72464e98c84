"""The convolutional net of cnn.py as a list of three layers, which mt.Pipeline can put on several ranks."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy

import mpitrain as mt
from mpitrain.arrays import Array

from . import cnn
from .layers import convolution_backward_input, dense, dense_backward, softmax_cross_entropy

NAMES = ("conv1", "conv2", "dense")


class Layer:
    """One layer of cnn.py. Its parameters are `weight` and `bias`."""

    def __init__(self, name: str, values: Mapping[str, Array]) -> None:
        self.name = name
        self.values = {kind: values[f"{name}.{kind}"] for kind in ("weight", "bias")}

    def parameters(self) -> Mapping[str, Array]:
        return self.values


class Convolution(Layer):
    """Convolution, pool and ReLU."""

    def forward(self, parameters: Mapping[str, Array], inputs: Array) -> tuple[Array, Any]:
        kept = cnn.stage(parameters, "", cnn.as_images(inputs) if inputs.ndim == 2 else inputs)
        return kept[-1], kept

    def backward(
        self, parameters: Mapping[str, Array], kept: Any, gradient: Array
    ) -> tuple[Array | None, Mapping[str, Array]]:
        gradients: dict[str, Array] = {}
        d = cnn.stage_backward(parameters, "", kept, gradient, gradients.__setitem__)
        is_first = self.name == NAMES[0]
        return None if is_first else convolution_backward_input(d, parameters["weight"]), gradients


class Dense(Layer):
    """From the pooled images to the scores."""

    def forward(self, parameters: Mapping[str, Array], inputs: Array) -> tuple[Array, Any]:
        flat = inputs.reshape(len(inputs), -1)
        return dense(flat, parameters["weight"], parameters["bias"]), (flat, inputs.shape)

    def backward(self, parameters: Mapping[str, Array], kept: Any, gradient: Array) -> tuple[Array, dict[str, Array]]:
        flat, shape = kept
        d, d_weight, d_bias = dense_backward(gradient, flat, parameters["weight"])
        return d.reshape(shape), {"weight": d_weight, "bias": d_bias}


def loss(scores: Array, labels: Array) -> tuple[float, Array]:
    value, gradient = softmax_cross_entropy(scores, labels)
    return float(value), gradient


def adapter(
    rng: numpy.random.Generator, xp: ModuleType, *, inputs: int, schedule: Callable[[int], float]
) -> mt.ArrayLayers:
    """The model with its optimizer, with the numbers of cnn.adapter."""
    values = cnn.initial(rng, xp, inputs=inputs)
    layers = [Convolution(NAMES[0], values), Convolution(NAMES[1], values), Dense(NAMES[2], values)]
    return mt.ArrayLayers(layers, loss, cnn.optimizer(schedule))


def named(parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Return parameters of all layers, such as `0.weight`, with the names of cnn.py."""
    return {f"{NAMES[int(name[0])]}{name[1:]}": value for name, value in parameters.items()}
