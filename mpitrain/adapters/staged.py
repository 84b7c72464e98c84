"""A model that is a list of layers, which a strategy can cut into stages; see strategies/pipeline.py.

    layers 0 1 | 2 3 | 4 5       each rank makes, trains and keeps only its own

A parameter's name begins with the number of its layer, as in `3.weight`. So a checkpoint has the whole model, whoever
had which layers, and each rank takes from it what it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy

from mpitrain.adapters.adapter import Adapter, OnGradient, scaled_of
from mpitrain.adapters.layer_costs import LayerCost, measure
from mpitrain.arrays import Array
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.remarks import Remarks
from mpitrain.training.loss_scale import LossScale
from mpitrain.tree import Tree, num_samples

_NAME = re.compile(r"(\d+)\.")


class LayerPiece(Protocol):
    """Consecutive layers. Several micro-batches may be between their passes. Backward passes add gradients up."""

    def forward(self, micro: int, inputs: Array) -> Array:
        """Return the output of the last layer for a micro-batch, and keep what the backward pass needs."""
        ...

    def loss(self, micro: int, inputs: Array, targets: Tree, share: float) -> float:
        """The same for the piece with the model's last layer: return the mean loss. Its gradients count `share`."""
        ...

    def backward(self, micro: int, gradient: Array | None, *, is_last: bool) -> Array | None:
        """Take the gradient by the output, None after `loss`. Return that by the inputs, unless they are data.

        With `is_last`, it is the last one of a step: gradients of parameters are handed on as soon as they are final.
        """
        ...

    def measure(self, inputs: Array) -> tuple[Array, int]:
        """Make a forward pass that nothing follows. Return its output, and the bytes of what it would keep."""
        ...


# Is called in place of a forward and a backward pass of the whole model: with the inputs, the targets and their number
# of samples. It runs this rank's passes, and returns the mean loss if this rank has the last layer, else 0.
RunPasses = Callable[[Array, Tree, int], float]


@dataclass(frozen=True)
class Cut:
    """What a rank has of a model.

    Attributes:
        pieces: the layers of each of this rank's pieces, in the order of the model.
        owners: for every layer, the stage that has it.
        recompute: keep only the inputs of a piece, and make its forward pass again before its backward pass.
        run: takes this rank's part of a batch through its pieces.
        norm_of_all: returns the norm of the gradients of all stages, given that of this one's.
    """

    pieces: Sequence[range]
    owners: Sequence[int]
    recompute: bool
    run: RunPasses
    norm_of_all: Callable[[float], float]


class StagedAdapter(Adapter, Protocol):
    """An Adapter whose layers can be cut into stages. Before that, it is one of the whole model."""

    @property
    def num_layers(self) -> int: ...

    def cut(self, cut: Cut) -> Sequence[LayerPiece]:
        """Keep only these layers, from now on. Return the pieces.

        Raises:
            ConfigError: the layers cannot be cut there, or they are made already.
        """
        ...

    def layer_costs(self, batch: Tree, *, recompute: bool) -> list[LayerCost]:
        """Measure every layer on this rank, before `cut`. Each is made for that, and then dropped.

        Raises:
            ConfigError: the layers are made already.
            DataError: the batch is no pair, or has no samples.
        """
        ...

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Let `restore` refuse a state whose parameters, of all layers, have other names or shapes. {}: any will do."""
        ...

    def lend(self, state: Mapping[str, Any]) -> None:
        """Let `state` return this, the state of the whole model, until the next `apply_gradients`."""
        ...

    def own_state(self) -> dict[str, Any]:
        """Return the state of the own layers."""
        ...


def is_staged(adapter: Adapter) -> bool:
    """True for a StagedAdapter. Asks the class, because a property such as `layout` would make all layers."""
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


class LayeredModel:
    """The common part of ArrayLayers and TorchLayers: an adapter of the own layers, made when it is first used."""

    def __init__(self, num_layers: int) -> None:
        if not num_layers:
            raise ConfigError("there are no layers; give at least one")
        self._num_layers = num_layers
        self._made: tuple[Any, Sequence[LayerPiece]] | None = None
        self._cut: Cut | None = None
        self._lent: Mapping[str, Any] | None = None
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    def _make(self, pieces: Sequence[range], *, recompute: bool) -> tuple[Any, Sequence[LayerPiece]]:
        """Make an adapter of these layers alone, and their pieces."""
        raise NotImplementedError

    def _alone(self, number: int, *, recompute: bool) -> tuple[LayerPiece, int]:
        """Make one layer as a piece. Return also the bytes of its parameters."""
        raise NotImplementedError

    def _check_cut(self, owners: Sequence[int]) -> None:
        """Raise ConfigError if something belongs to layers of several owners."""
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        """See StagedAdapter."""
        return self._num_layers

    def cut(self, cut: Cut) -> Sequence[LayerPiece]:
        """See StagedAdapter."""
        self._refuse_made()
        self._check_cut(cut.owners)
        self._cut, self._made = cut, self._make(cut.pieces, recompute=cut.recompute)
        inner = self._inner
        if set(cut.owners) != {0}:
            inner.update_only(0, 1, cut.norm_of_all)
        return self._pieces

    def layer_costs(self, batch: Tree, *, recompute: bool) -> list[LayerCost]:
        """See StagedAdapter."""
        self._refuse_made()
        inputs, targets = _pair(batch)
        if not num_samples(batch):
            raise DataError("layers were to be measured with a batch without samples; give at least one")
        return measure(partial(self._alone, recompute=recompute), self._num_layers, inputs, targets)

    def _refuse_made(self) -> None:
        """Raise ConfigError if the layers are made."""
        if self._made is not None:
            raise ConfigError(
                f"{type(self).__name__}: the layers are made already, for a Trainer or by a call such as parameters(); "
                "make a new one in each build(world)"
            )

    @property
    def _inner(self) -> Any:
        """The adapter of the own layers."""
        if self._made is None:
            self._made = self._make([range(self._num_layers)], recompute=False)
        return self._made[0]

    @property
    def _pieces(self) -> Sequence[LayerPiece]:
        assert self._inner is not None and self._made is not None
        return self._made[1]

    def _run(self, batch: Tree) -> float:
        """Take a batch through the model: by the strategy's schedule, or at once. A batch without samples gives 0."""
        inputs, targets = _pair(batch)
        count = num_samples(batch)
        if self._cut is not None:
            return self._cut.run(inputs, targets, count)
        if not count:
            return 0.0
        (piece,) = self._pieces
        loss = piece.loss(0, inputs, targets, 1.0)
        piece.backward(0, None, is_last=True)
        return loss

    @property
    def layout(self) -> Sequence[Parameter]:
        """See Adapter: of the own layers."""
        layout: Sequence[Parameter] = self._inner.layout
        return layout

    @property
    def loss_scale(self) -> LossScale | None:
        """See Adapter. There is none."""
        return None

    @property
    def precision(self) -> numpy.dtype:
        """See Adapter."""
        precision: numpy.dtype = self._inner.precision
        return precision

    def parameters(self) -> dict[str, Array]:
        """See Adapter: of the own layers."""
        parameters: dict[str, Array] = self._inner.parameters()
        return parameters

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See Adapter."""
        self._inner.load_parameters(values)

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """See Adapter. The batch is a pair: what the first layer gets, and what the loss gets beside the output."""
        loss: float = self._inner.loss_and_gradients(batch, on_gradient)
        return loss

    def note(self) -> Any:
        """See Adapter."""
        return self._inner.note()

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array], remarks: Remarks) -> float:
        """See Adapter."""
        self._lent = None
        rate: float = self._inner.apply_gradients(flats, remarks)
        return rate

    def scale_next_rate(self, factor: float) -> None:
        """See ArrayFunction."""
        scaled_of(self._inner).scale_next_rate(factor)

    def measure_gradient_norm(self) -> None:
        """See Adapter."""
        self._inner.measure_gradient_norm()

    def gradient_norm(self) -> float | None:
        """See Adapter. The norm is that of all layers."""
        norm: float | None = self._inner.gradient_norm()
        return norm

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See StagedAdapter."""
        self._shapes = shapes

    def lend(self, state: Mapping[str, Any]) -> None:
        """See StagedAdapter."""
        self._lent = state

    def own_state(self) -> dict[str, Any]:
        """See StagedAdapter."""
        state: dict[str, Any] = self._inner.state()
        return state

    def state(self) -> dict[str, Any]:
        """See Adapter: of the whole model.

        Raises:
            ConfigError: the layers are on several ranks, and nobody has brought their state together.
        """
        if self._cut is None or set(self._cut.owners) == {0}:
            return self.own_state()
        if self._lent is None:
            raise ConfigError(
                "the layers are on several ranks, and each has the state of its own. Call own_state() of the strategy "
                "on all ranks first, after the last step; only ranks that read the state get it"
            )
        return dict(self._lent)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Adapter: takes the state of the whole model. Ranks with different layers refuse the same states."""
        given = state["parameters"]
        for name in given:
            number = layer_of(name)
            if number is None or number >= self._num_layers:
                raise CheckpointError(
                    f"the checkpoint has a parameter {name}, the model layers 0 to {self._num_layers - 1}; is it a "
                    "checkpoint of this model?"
                )
        for name, shape in self._shapes.items():
            if name not in given or numpy.shape(given[name]) != shape:
                content = f"{name} of shape {numpy.shape(given[name])}" if name in given else f"nothing for {name}"
                raise CheckpointError(
                    f"the checkpoint has {content}, the model {name} of shape {shape}; is it a "
                    "checkpoint of this model?"
                )
        own = range(self._num_layers)
        numbers = set(own) if self._cut is None else {number for piece in self._cut.pieces for number in piece}
        self._inner.restore(selected(state, numbers))
        self._lent = None


def _pair(batch: Tree) -> tuple[Array, Tree]:
    """Return the inputs of the first layer, and what the loss gets beside the output."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        kind = f"{len(batch)} entries" if isinstance(batch, tuple | list) else type(batch).__name__
        raise DataError(f"a batch of layers is a pair: the inputs of the first layer, and targets; this has {kind}")
    return batch[0], batch[1]


def check_parameters(names: Collection[str], layers: Sequence[int]) -> None:
    """Raise ConfigError if these layers have no parameters."""
    if not names:
        text = f"layer {layers[0]} has" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]} have"
        raise ConfigError(
            f"{text} no parameters to train; every stage needs one. Give such layers to the stage of another "
            "layer: stages=[...] has the number of layers of every stage"
        )


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a parameter belongs to; None if this is no name of one."""
    match = _NAME.match(name)
    return int(match[1]) if match else None


def selected(state: Mapping[str, Any], layers: Collection[int]) -> dict[str, Any]:
    """Return a state without what belongs to other layers."""
    return {
        key: selected(value, layers) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if (number := layer_of(key)) is None or number in layers
    }


def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of the whole model, from those of all stages. What belongs to no layer is equal in all."""
    whole: dict[str, Any] = {}
    for state in states:
        for key, value in state.items():
            if isinstance(value, Mapping):
                whole[key] = joined([whole.get(key, {}), value])
            else:
                whole.setdefault(key, value)
    return whole
