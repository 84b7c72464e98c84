"""ArrayLayers: a model that is a list of layers of NumPy or CuPy arrays, each with its forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from mpitrain.adapters.array_function import ArrayFunction
from mpitrain.adapters.layered_model import LayeredModel, check_parameters
from mpitrain.adapters.staged import LayerPiece
from mpitrain.arrays import Array, is_array, like
from mpitrain.errors import ConfigError
from mpitrain.optim.optimizers import Optimizer
from mpitrain.tree import Tree, leaves, rebuild


class ArrayLayer(Protocol):
    """One layer. It keeps nothing from pass to pass."""

    def parameters(self) -> Mapping[str, Array]:
        """Return the initial values by name, the same on every rank. Only ranks that have the layer call it."""
        ...

    def forward(self, parameters: Mapping[str, Array], inputs: Array) -> tuple[Array, Any]:
        """Return the output, a new array, and what `backward` needs. The first dimension is that of the samples."""
        ...

    def backward(
        self, parameters: Mapping[str, Array], kept: Any, gradient: Array
    ) -> tuple[Array | None, Mapping[str, Array]]:
        """Return the gradients of the inputs and of every parameter, given the `gradient` of the output.

        None for the inputs is allowed in the first layer of the model.
        """
        ...


# loss(output, targets) -> the mean loss over the samples, and its gradient with respect to the output.
ArrayLoss: TypeAlias = Callable[[Array, Tree], tuple[float, Array]]


class ArrayLayers(LayeredModel):
    """An Adapter around a list of layers and a loss. mt.Pipeline can cut it; see docs/how-to/large-models.md.

    Parameters are named by the number of their layer, such as `3.weight`. A batch is a pair: the inputs of the first
    layer, and what the loss gets beside the output.
    """

    def __init__(self, layers: Sequence[ArrayLayer], loss: ArrayLoss, optimizer: Optimizer) -> None:
        """Not collective; every rank gives the same layers. No parameter is made yet.

        Args:
            layers: in the order of the model.
            loss: returns the mean loss over the samples, and its gradient with respect to the output of the last layer.
            optimizer: as for ArrayFunction.

        Raises:
            ConfigError: there are no layers.
        """
        super().__init__(len(layers))
        self._layers: Sequence[ArrayLayer] = layers
        self._loss, self._optimizer = loss, optimizer

    def _check_cut(self, owners: Sequence[int]) -> None:
        """See LayeredModel. Each layer has its own parameters, wherever it is: _make checks this."""

    def _make(self, pieces: Sequence[range], *, recompute: bool) -> tuple[ArrayFunction, Sequence[LayerPiece]]:
        numbers = [number for piece in pieces for number in piece]
        values: dict[str, Array] = {}
        seen: dict[int, str] = {}
        for number in numbers:
            for name, value in self._layers[number].parameters().items():
                full = f"{number}.{name}"
                if (other := seen.setdefault(id(value), full)) != full:
                    raise ConfigError(
                        f"{full} and {other} are one array; layers of ArrayLayers cannot share parameters. Give each "
                        "layer its own, or use ArrayFunction, which is not cut"
                    )
                values[full] = value
        check_parameters(values, numbers)
        made = [_ArrayPiece({n: self._layers[n] for n in piece}, self._loss, recompute=recompute) for piece in pieces]
        own = {number: [name for name in values if name.startswith(f"{number}.")] for number in numbers}

        def function(parameters: Mapping[str, Array], batch: Tree, on_gradient: Callable[[str, Array], None]) -> float:
            views = {n: {name.split(".", 1)[1]: parameters[name] for name in own[n]} for n in numbers}
            left = dict.fromkeys(reversed(values))

            def hand_in(name: str, gradient: Array) -> None:
                del left[name]
                on_gradient(name, gradient)

            for piece in made:
                piece.begin(views, hand_in)
            loss = self._run(batch)
            for name in left:  # there were no samples
                on_gradient(name, parameters[name] * 0)
            return loss

        return ArrayFunction(function, values, self._optimizer), made

    @contextmanager
    def _alone(self, number: int, *, recompute: bool) -> Iterator[tuple[LayerPiece, int]]:
        layer = self._layers[number]
        values = layer.parameters()
        piece = _ArrayPiece({number: layer}, self._loss, recompute=recompute)
        piece.begin({number: values}, lambda name, gradient: None)
        yield piece, sum(value.nbytes for value in values.values())


class _ArrayPiece:
    """See LayerPiece."""

    def __init__(self, layers: Mapping[int, ArrayLayer], loss: ArrayLoss, *, recompute: bool) -> None:
        self._layers, self._loss, self._recompute = layers, loss, recompute
        self._kept: dict[int, tuple[Any, Array]] = {}  # by micro-batch: of the layers; the gradient of the loss

    def begin(self, parameters: Mapping[int, Mapping[str, Array]], hand_in: Callable[[str, Array], None]) -> None:
        """Begin a step. `hand_in` is called with the gradient of every parameter, summed over the micro-batches."""
        self._parameters, self._hand_in = parameters, hand_in
        self._totals: dict[str, Array] = {}
        self._somewhere = next((value for values in parameters.values() for value in values.values()), None)
        self._kept.clear()  # an error may have ended the previous step

    def forward(self, micro: int, inputs: Array) -> Array:
        """See LayerPiece."""
        inputs = like(inputs, self._somewhere)
        kept, output = self._through(inputs)
        self._kept[micro] = (inputs if self._recompute else kept), None
        return output

    def measure(self, inputs: Array) -> tuple[Array, int]:
        """See LayerPiece. Arrays in dicts, lists and tuples are counted; a parameter takes no more memory."""
        output = self.forward(0, inputs)
        kept, _ = self._kept.pop(0)
        counted = {id(value): 0 for values in self._parameters.values() for value in values.values()}
        for one in _arrays_in(kept):
            counted.setdefault(id(one), one.nbytes)
        return output, sum(counted.values())

    def loss(self, micro: int, inputs: Array, targets: Tree, share: float) -> float:
        """See LayerPiece."""
        output = self.forward(micro, inputs)
        there = (like(leaf, output) if is_array(leaf) else leaf for _, leaf in leaves(targets))
        loss, gradient = self._loss(output, rebuild(targets, there.__next__))
        self._kept[micro] = self._kept[micro][0], (gradient if share == 1.0 else gradient * share)
        return float(loss)

    def backward(self, micro: int, gradient: Array | None, *, is_last: bool) -> Array | None:
        """See LayerPiece."""
        kept, of_loss = self._kept.pop(micro)
        if self._recompute:
            kept, _ = self._through(kept)
        gradient = of_loss if gradient is None else like(gradient, self._somewhere)
        for number in reversed([*self._layers]):
            values = self._parameters[number]
            gradient, of_parameters = self._layers[number].backward(values, kept.pop(number), gradient)
            if of_parameters.keys() != values.keys():
                raise ConfigError(
                    f"layer {number} gives gradients of {', '.join(of_parameters) or 'nothing'}; its parameters are "
                    f"{', '.join(values) or 'none'}. Return a gradient for each"
                )
            for name, one in of_parameters.items():
                full = f"{number}.{name}"
                # Not in place: a layer may return a view of the gradient that was passed to it.
                total = self._totals.pop(full) + one if full in self._totals else one
                if is_last:
                    self._hand_in(full, total)
                else:
                    self._totals[full] = total
        return gradient

    def _through(self, inputs: Array) -> tuple[dict[int, Any], Array]:
        kept: dict[int, Any] = {}
        for number, layer in self._layers.items():
            inputs, kept[number] = layer.forward(self._parameters[number], inputs)
        return kept, inputs


def _arrays_in(kept: Any) -> Iterator[Array]:
    """Yield every array in what a layer keeps, which may be any object."""
    if is_array(kept):
        yield kept
    elif isinstance(kept, dict | list | tuple):
        for one in kept.values() if isinstance(kept, dict) else kept:
            yield from _arrays_in(one)
