"""ArrayFunction: a model that is a function of NumPy or CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from mpitrain.adapters.adapter import OnGradient
from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.cuda.staging import like
from mpitrain.errors import CheckpointError, ConfigError, GradientError
from mpitrain.exchange.bucket import Parameter, plan_layout
from mpitrain.training.optimizers import Optimizer
from mpitrain.tree import Tree, leaves, rebuild

# function(parameters, batch, on_gradient) -> loss; it calls on_gradient(name, gradient) for every parameter.
LossAndGradients = Callable[[Mapping[str, Array], Tree, Callable[[str, Array], None]], float]


class ArrayFunction:
    """An Adapter around `function(parameters, batch, on_gradient) -> loss`.

    All parameters live in one flat buffer, so that the optimizer is a few array operations; the function gets views
    of it by name.
    """

    def __init__(self, function: LossAndGradients, parameters: Mapping[str, Array], optimizer: Optimizer) -> None:
        """
        Args:
            function: returns the mean loss over the batch's samples and calls `on_gradient(name, gradient)` once for
                every parameter, as soon as that gradient is final.
            parameters: initial values by name, in the order in which the model uses them; all on the host or all on
                one device, all of one floating dtype. Copied.
            optimizer: weight decay, where it has one, applies to parameters of two and more dimensions.

        Raises:
            ConfigError: no parameters, or of several dtypes or places.
        """
        self._function = function
        self._optimizer = optimizer
        values = list(parameters.values())
        if len({(value.dtype, is_device_array(value)) for value in values}) != 1:
            found = ", ".join(f"{name} {value.dtype}" for name, value in parameters.items()) or "none"
            raise ConfigError(f"parameters must be of one dtype, all on the host or all on one device: {found}")
        plan = plan_layout([Parameter(name, value.shape, value.dtype) for name, value in parameters.items()])
        self._layout = plan.parameters
        self._index = {parameter.name: index for index, parameter in enumerate(plan.parameters)}
        dtype, count = next(iter(plan.counts.items()))
        self._flat = namespace(values[0]).empty(count, dtype)
        views = plan.views({dtype: self._flat})
        for view, value in zip(views, values, strict=True):
            view[...] = value
        self._views: dict[str, Array] = dict(zip(self._index, views, strict=True))
        self._places = plan.places
        decayed = [slice(*place) for place, view in zip(plan.places, views, strict=True) if len(view.shape) > 1]
        optimizer.start(self._flat, decayed)

    @property
    def layout(self) -> Sequence[Parameter]:
        """See Adapter."""
        return self._layout

    def parameters(self) -> dict[str, Array]:
        """See Adapter. A new dict of the same views."""
        return dict(self._views)

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See Adapter."""
        for name, view in self._views.items():
            view[...] = like(values[name], view) if isinstance(values[name], numpy.ndarray) else values[name]

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """See Adapter. A batch on the host is copied to the device where the parameters are."""
        if is_device_array(self._flat):
            values = (like(leaf, self._flat) for _, leaf in leaves(batch))
            batch = rebuild(batch, values.__next__)

        def hand_in(name: str, gradient: Array) -> None:
            if name not in self._index:
                raise GradientError(f"a gradient came for {name!r}; the parameters are {', '.join(self._index)}")
            on_gradient(self._index[name], gradient)

        return float(self._function(self._views, batch, hand_in))

    def apply_gradients(self, flats: Mapping[numpy.dtype, numpy.ndarray]) -> float:
        """See Adapter."""
        return self._optimizer.update(like(flats[self._flat.dtype], self._flat))

    def state(self) -> dict[str, Any]:
        """See Adapter: `parameters`, and `optimizer` with its buffers by parameter name and its step."""
        optimizer: dict[str, Any] = {}
        for key, value in self._optimizer.state().items():
            optimizer[key] = value if isinstance(value, int) else self._by_name(value)
        return {"parameters": self.parameters(), "optimizer": optimizer}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Adapter."""
        self._check(state["parameters"], "parameters")
        optimizer: dict[str, Any] = {}
        for key, value in state["optimizer"].items():
            if isinstance(value, int):
                optimizer[key] = value
                continue
            self._check(value, key)
            optimizer[key] = namespace(self._flat).concatenate(
                [like(value[name], self._flat).ravel() for name in self._views]
            )
        self._optimizer.restore(optimizer)
        self.load_parameters(state["parameters"])

    def _by_name(self, flat: Array) -> dict[str, Array]:
        return {
            name: flat[slice(*place)].reshape(self._views[name].shape)
            for name, place in zip(self._views, self._places, strict=True)
        }

    def _check(self, values: Mapping[str, Array], what: str) -> None:
        """Raise CheckpointError unless `values` has this model's names, shapes and dtypes."""
        found = {name: (value.shape, value.dtype) for name, value in values.items()}
        expected = {name: (view.shape, view.dtype) for name, view in self._views.items()}
        for name in [*expected, *found]:
            if found.get(name) != expected.get(name):
                raise CheckpointError(
                    f"{what}: the checkpoint has {_text(found.get(name))} for {name}, the model "
                    f"{_text(expected.get(name))}; is it a checkpoint of this model?"
                )


def _text(kind: tuple[tuple[int, ...], numpy.dtype] | None) -> str:
    return "nothing" if kind is None else f"{kind[1]} {kind[0]}"
