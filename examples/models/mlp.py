"""A multi-layer perceptron: dense layers with ReLU between them, softmax cross-entropy at the end."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType

import numpy
from numpy.typing import DTypeLike

import mpitrain as mt
from mpitrain.arrays import Array

from .layers import dense, dense_backward, normal, product, relu, relu_backward, softmax_cross_entropy, wide


def initial(
    rng: numpy.random.Generator,
    xp: ModuleType,
    *,
    inputs: int = 784,
    hidden: Sequence[int] = (256,),
    classes: int = 10,
    dtype: DTypeLike = "float32",
) -> dict[str, Array]:
    """Random parameters: He et al. (2015) for the weights, zeros for the biases."""
    parameters = {}
    for layer, (rows, columns) in enumerate(pairwise([inputs, *hidden, classes]), start=1):
        parameters[f"dense{layer}.weight"] = normal(rng, xp, (rows, columns), math.sqrt(2 / rows), dtype)
        parameters[f"dense{layer}.bias"] = xp.zeros(columns, dtype)
    return parameters


def adapter(
    rng: numpy.random.Generator,
    xp: ModuleType,
    *,
    inputs: int,
    schedule: Callable[[int], float],
    precision: str = "float32",
) -> mt.ArrayFunction:
    """The model with its optimizer, for the Trainer. See `models`."""
    optimizer = mt.optim.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return mt.ArrayFunction(loss_and_gradients, initial(rng, xp, inputs=inputs), optimizer, precision=precision)


def scores(parameters: dict[str, Array], x: Array) -> Array:
    """The logits (n, classes) of x (n, inputs)."""
    return _forward(parameters, x)[-1]


def loss_and_gradients(
    parameters: dict[str, Array],
    batch: tuple[Array, Array],
    on_gradient: Callable[[str, Array], None],
    loss_scale: float = 1.0,
) -> float:
    """The mean loss over the samples of batch = x (n, inputs), integer labels y (n,). See `models`."""
    x, y = batch
    *inputs, logits = _forward(parameters, x)
    loss, d = softmax_cross_entropy(logits, y, loss_scale)
    for layer in range(len(inputs), 0, -1):
        if layer < len(inputs):
            d = relu_backward(d, inputs[layer])
        weight = parameters[f"dense{layer}.weight"]
        if layer > 1:
            d, d_weight, d_bias = dense_backward(d, inputs[layer - 1], weight)
        else:  # the gradient by the images themselves is not needed
            d_weight, d_bias = product(inputs[0].T, d), wide(d).sum(axis=0)
        on_gradient(f"dense{layer}.bias", d_bias)
        on_gradient(f"dense{layer}.weight", d_weight)
    return float(loss)


def _forward(parameters: dict[str, Array], x: Array) -> list[Array]:
    """The input of every layer, then the logits."""
    values = [x]
    depth = len(parameters) // 2
    for layer in range(1, depth + 1):
        x = dense(x, parameters[f"dense{layer}.weight"], parameters[f"dense{layer}.bias"])
        if layer < depth:
            x = relu(x)
        values.append(x)
    return values
