"""A small convolutional net: two times (3x3 convolution, 2x2 max-pool, ReLU), then a dense layer.

Pooling comes before the ReLU: the result is the same and the ReLU has a quarter of the work.
"""

import math
from collections.abc import Callable, Mapping
from types import ModuleType

import numpy
from numpy.typing import DTypeLike

import mpitrain as mt
from mpitrain.arrays import Array

from .layers import (
    convolution,
    convolution_backward_input,
    convolution_backward_weight,
    dense,
    dense_backward,
    max_pool,
    max_pool_backward,
    normal,
    relu,
    relu_backward,
    softmax_cross_entropy,
    wide,
)


def initial(
    rng: numpy.random.Generator,
    xp: ModuleType,
    *,
    inputs: int = 784,
    channels: tuple[int, int] = (16, 32),
    classes: int = 10,
    dtype: DTypeLike = "float32",
) -> dict[str, Array]:
    """Random parameters for square one-channel images of `inputs` pixels, the side a multiple of 4.

    He et al. (2015) for the weights, zeros for the biases.
    """
    side = math.isqrt(inputs)
    if side * side != inputs or side % 4:
        raise ValueError(f"inputs is {inputs}; allowed: the square of a multiple of 4")
    first, second = channels
    flat = (side // 4) ** 2 * second
    return {
        "conv1.weight": normal(rng, xp, (3, 3, 1, first), math.sqrt(2 / 9), dtype),
        "conv1.bias": xp.zeros(first, dtype),
        "conv2.weight": normal(rng, xp, (3, 3, first, second), math.sqrt(2 / (9 * first)), dtype),
        "conv2.bias": xp.zeros(second, dtype),
        "dense.weight": normal(rng, xp, (flat, classes), math.sqrt(2 / flat), dtype),
        "dense.bias": xp.zeros(classes, dtype),
    }


def adapter(
    rng: numpy.random.Generator,
    xp: ModuleType,
    *,
    inputs: int,
    schedule: Callable[[int], float],
    precision: str = "float32",
) -> mt.ArrayFunction:
    """The model with its optimizer, for the Trainer. See `models`."""
    return mt.ArrayFunction(
        loss_and_gradients, initial(rng, xp, inputs=inputs), optimizer(schedule), precision=precision
    )


def optimizer(schedule: Callable[[int], float]) -> mt.optim.SGD:
    """The optimizer that the model is trained with."""
    return mt.optim.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=5e-4)


def scores(parameters: dict[str, Array], x: Array) -> Array:
    """The logits (n, classes) of x (n, inputs)."""
    return _forward(parameters, x)[0]


def loss_and_gradients(
    parameters: dict[str, Array],
    batch: tuple[Array, Array],
    on_gradient: Callable[[str, Array], None],
    loss_scale: float = 1.0,
) -> float:
    """The mean loss over the samples of batch = x (n, inputs), integer labels y (n,). See `models`."""
    x, y = batch
    logits, (stage1, stage2), flat = _forward(parameters, x)
    loss, d = softmax_cross_entropy(logits, y, loss_scale)
    d, d_weight, d_bias = dense_backward(d, flat, parameters["dense.weight"])
    on_gradient("dense.bias", d_bias)
    on_gradient("dense.weight", d_weight)
    d = stage_backward(parameters, "conv2.", stage2, d.reshape(stage2[-1].shape), on_gradient)
    d = convolution_backward_input(d, parameters["conv2.weight"])
    stage_backward(parameters, "conv1.", stage1, d, on_gradient)
    return float(loss)


def _forward(parameters: dict[str, Array], x: Array) -> tuple[Array, tuple[list[Array], list[Array]], Array]:
    stage1 = stage(parameters, "conv1.", as_images(x))
    stage2 = stage(parameters, "conv2.", stage1[-1])
    flat = stage2[-1].reshape(len(x), len(parameters["dense.weight"]))
    return dense(flat, parameters["dense.weight"], parameters["dense.bias"]), (stage1, stage2), flat


def as_images(x: Array) -> Array:
    """The images of x (n, inputs), as (n, side, side, 1)."""
    side = math.isqrt(x.shape[1])
    return x.reshape(len(x), side, side, 1)


def stage(parameters: Mapping[str, Array], prefix: str, x: Array) -> list[Array]:
    """Convolution, pool, ReLU. Returns the values for the backward pass; the output is last."""
    convolved, rows = convolution(x, parameters[f"{prefix}weight"])
    convolved += parameters[f"{prefix}bias"]
    pooled = max_pool(convolved)
    return [rows, convolved, pooled, relu(pooled)]


def stage_backward(
    parameters: Mapping[str, Array],
    prefix: str,
    kept: list[Array],
    d: Array,
    on_gradient: Callable[[str, Array], None],
) -> Array:
    """Hand in the stage's gradients. Return the gradient with respect to the convolution's output."""
    rows, convolved, pooled, out = kept
    d = max_pool_backward(relu_backward(d, out), convolved, pooled)
    on_gradient(f"{prefix}bias", wide(d).reshape(len(rows), d.shape[3]).sum(axis=0))
    on_gradient(f"{prefix}weight", convolution_backward_weight(d, rows, parameters[f"{prefix}weight"]))
    return d
