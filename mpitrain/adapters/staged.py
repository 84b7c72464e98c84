"""A model that is a list of layers, which a strategy can cut into stages; see strategies/pipeline.py.

    layers 0 1 | 2 3 | 4 5       each rank makes, trains and keeps only its own

A parameter's name begins with the number of its layer, as in `3.weight`. So a checkpoint has the whole model, however
the layers were divided, and each rank loads its own layers from it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array, namespace
from mpitrain.cuda.streams import wait_for_work
from mpitrain.errors import ConfigError
from mpitrain.tree import Tree

_NAME = re.compile(r"(\d+)\.")
_ROUNDS = 3  # the fastest counts: a disturbance only makes a round slower


class LayerPiece(Protocol):
    """Consecutive layers. Several micro-batches may be between their passes. Backward passes accumulate gradients."""

    def forward(self, micro: int, inputs: Array) -> Array:
        """Return the last layer's output for a micro-batch, and keep what the backward pass needs."""
        ...

    def loss(self, micro: int, inputs: Array, targets: Tree, share: float) -> float:
        """The same for the piece with the model's last layer: return the mean loss. Its gradients are weighted by
        `share`."""
        ...

    def backward(self, micro: int, gradient: Array | None, *, is_last: bool) -> Array | None:
        """Take the gradient of the output, None after `loss`. Return the gradient of the inputs, unless they are data.

        With `is_last`, it is the last pass of a step: gradients of parameters are passed on as soon as they are final.
        """
        ...

    def measure(self, inputs: Array) -> tuple[Array, int]:
        """Make a forward pass without a backward pass. Return its output, and the bytes of what it would keep."""
        ...


# Called in place of a forward and a backward pass of the whole model, with the inputs, the targets and their number of
# samples. It runs this rank's passes, and returns the mean loss if this rank has the last layer, else 0.
RunPasses = Callable[[Array, Tree, int], float]


@dataclass(frozen=True)
class Cut:
    """A rank's part of a model.

    Attributes:
        pieces: the layers of each of this rank's pieces, in the order of the model.
        owners: for every layer, the stage that has it.
        recompute: keep only the inputs of a piece, and make its forward pass again before its backward pass.
        run: takes this rank's part of a batch through its pieces.
        norm_of_all: returns the norm of the gradients of all stages, given the norm of this stage's.
    """

    pieces: Sequence[range]
    owners: Sequence[int]
    recompute: bool
    run: RunPasses
    norm_of_all: Callable[[float], float]


class LayerCost(NamedTuple):
    """The cost of a layer for one micro-batch.

    Attributes:
        seconds: of the forward and the backward pass.
        parameter_bytes: of the trained parameters, without gradients and the optimizer's state.
        activation_bytes: of what the layer keeps from its forward to its backward pass.
    """

    seconds: float
    parameter_bytes: int
    activation_bytes: int


class StagedAdapter(Adapter, Protocol):
    """An Adapter whose layers can be cut into stages. Before that, it is an Adapter of the whole model."""

    @property
    def num_layers(self) -> int: ...

    def cut(self, cut: Cut) -> Sequence[LayerPiece]:
        """Keep only these layers from now on. Return the pieces.

        Raises:
            ConfigError: the layers cannot be cut there, or have already been made.
        """
        ...

    def layer_costs(self, batch: Tree, *, recompute: bool) -> list[LayerCost]:
        """Measure every layer on this rank, before `cut`. Each one is made for the measurement, and then dropped.

        Raises:
            ConfigError: the layers are made already.
            DataError: the batch is no pair, or has no samples.
        """
        ...

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make `restore` refuse a state whose parameters, over all layers, have other names or shapes. {}: any are
        accepted."""
        ...

    def lend(self, state: Mapping[str, Any]) -> None:
        """Make `state` return this, the state of the whole model, until the next `apply_gradients`."""
        ...

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank's own layers."""
        ...


def measure(
    alone: Callable[[int], AbstractContextManager[tuple[LayerPiece, int]]],
    num_layers: int,
    inputs: Array,
    targets: Tree,
) -> list[LayerCost]:
    """Return what every layer costs on this rank. They are measured in turn, so a rank needs room for one only.

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
            for _ in range(1 + _ROUNDS):  # the first round allocates memory, and is not counted
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


def is_staged(adapter: Adapter) -> bool:
    """True for a StagedAdapter. It inspects the class, because reading a property such as `layout` would make all
    layers."""
    return hasattr(type(adapter), "cut")


def staged_of(adapter: Adapter) -> StagedAdapter:
    """Return an adapter whose layers can be cut.

    Raises:
        ConfigError: this one's cannot.
    """
    if not is_staged(adapter):
        raise ConfigError(
            f"{type(adapter).__name__} has no list of layers, so its model cannot be cut into stages; mt.ArrayLayers "
            "and mt.TorchLayers have one"
        )
    return cast(StagedAdapter, adapter)


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a parameter belongs to; None if the name is not that of a parameter."""
    match = _NAME.match(name)
    return int(match[1]) if match else None


def selected(state: Mapping[str, Any], layers: Collection[int]) -> dict[str, Any]:
    """Return a state without the entries of other layers."""
    return {
        key: selected(value, layers) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if (number := layer_of(key)) is None or number in layers
    }


def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of the whole model, from those of all stages. Entries that belong to no layer are equal in
    all."""
    whole: dict[str, Any] = {}
    for state in states:
        for key, value in state.items():
            if isinstance(value, Mapping):
                whole[key] = joined([whole.get(key, {}), value])
            else:
                whole.setdefault(key, value)
    return whole
