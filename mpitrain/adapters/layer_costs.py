"""What each layer of a model costs on this rank. The layers are measured in turn, so a rank needs room for one only."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from mpitrain.arrays import Array, namespace
from mpitrain.cuda.streams import wait_for_work
from mpitrain.tree import Tree

if TYPE_CHECKING:
    from mpitrain.adapters.staged import LayerPiece

_ROUNDS = 3  # the fastest counts: what disturbs a round only makes it slower


class LayerCost(NamedTuple):
    """What a layer takes for one micro-batch.

    Attributes:
        seconds: of the forward and the backward pass.
        parameter_bytes: of the trained parameters, without gradients and the optimizer's state.
        activation_bytes: what the layer keeps from its forward to its backward pass.
    """

    seconds: float
    parameter_bytes: int
    activation_bytes: int


def measure(
    alone: Callable[[int], AbstractContextManager[tuple[LayerPiece, int]]],
    num_layers: int,
    inputs: Array,
    targets: Tree,
) -> list[LayerCost]:
    """Return the cost of every layer.

    Args:
        alone: a context with one layer as a piece, and the bytes of its parameters.
        inputs, targets: a micro-batch.
    """
    costs = []
    for number in range(num_layers):
        is_last = number == num_layers - 1
        with alone(number) as (piece, parameter_bytes):
            output, activation_bytes = piece.measure(inputs)
            gradient = None if is_last else namespace(output).ones_like(output)
            seconds = []
            for _ in range(1 + _ROUNDS):  # the first round has to find memory, and is not counted
                begun = time.perf_counter()
                if is_last:
                    piece.loss(0, inputs, targets, 1.0)
                else:
                    piece.forward(0, inputs)
                piece.backward(0, gradient, is_last=False)
                wait_for_work(output)
                seconds.append(time.perf_counter() - begun)
        costs.append(LayerCost(min(seconds[1:]), parameter_bytes, activation_bytes))
        inputs = output
        del piece  # before the next layer is made
    return costs
