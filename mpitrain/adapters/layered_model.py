"""The common part of ArrayLayers and TorchLayers: the StagedAdapter of a list of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy

from mpitrain.adapters.adapter import AdapterAround
from mpitrain.adapters.staged import Cut, LayerCost, LayerPiece, layer_of, measure, selected
from mpitrain.arrays import Array
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.optim.loss_scale import LossScale
from mpitrain.reducer.means import Remarks
from mpitrain.tree import Tree, num_samples


class LayeredModel(AdapterAround):
    """A model with an adapter of this rank's own layers, which is made at its first use.

    Layout and parameters are those of the own layers, and the norm of the gradients is that of all layers. A batch is a
    pair: the input of the first layer, and the second argument of the loss.
    """

    def __init__(self, num_layers: int) -> None:
        if not num_layers:
            raise ConfigError("there are no layers; give at least one")
        self._num_layers = num_layers
        self._made: tuple[Any, Sequence[LayerPiece]] | None = None
        self._cut: Cut | None = None
        self._lent: Mapping[str, Any] | None = None
        self._shapes: Mapping[str, tuple[int, ...]] = {}

    def _make(self, pieces: Sequence[range], *, recompute: bool) -> tuple[Any, Sequence[LayerPiece]]:
        """Make an adapter of only these layers, and their pieces."""
        raise NotImplementedError

    def _alone(self, number: int, *, recompute: bool) -> AbstractContextManager[tuple[LayerPiece, int]]:
        """A context with one layer as a piece, and the bytes of its parameters. Nothing remains after it."""
        raise NotImplementedError

    def _check_cut(self, owners: Sequence[int]) -> None:
        """Raise ConfigError if an object belongs to layers of several owners."""
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
        """Raise ConfigError if the layers have already been made."""
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
        """Run a batch through the model: by the strategy's schedule, or at once. A batch without samples gives 0."""
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
    def loss_scale(self) -> LossScale | None:
        """See Adapter. There is none."""
        return None

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array], remarks: Remarks) -> float:
        """See Adapter."""
        self._lent = None
        return super().apply_gradients(flats, remarks)

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
            ConfigError: the layers are on several ranks, and their state has not been gathered.
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
        """See Adapter: takes the state of the whole model. Ranks refuse the same states, whichever layers they have."""
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
    """Return the inputs of the first layer, and the second argument of the loss."""
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
