"""The only interface to a framework: a model's parameters, its gradients and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy

from mpitrain.arrays import Array
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.optim.loss_scale import LossScale
from mpitrain.optim.owned import Owned
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.division import Division
from mpitrain.reducer.means import Remarks
from mpitrain.tree import Tree

# Is called with a parameter's index and its gradient, as soon as the backward pass has it. The gradient is None if the
# loss does not depend on the parameter.
OnGradient: TypeAlias = Callable[[int, Array | None], None]


class LocalModel(Protocol):
    """The parameters and the optimizer of this rank. No method communicates; every rank makes the same calls."""

    @property
    def layout(self) -> Sequence[Parameter]:
        """The name, shape and dtype of every parameter. A parameter's index is its position here.

        This lists what is trained, and then what else changes by a mean over the samples, such as running means. An
        adapter with such buffers has their number as `num_buffers`. A server with stale gradients takes smaller changes
        of them.
        """
        ...

    def parameters(self) -> dict[str, Array]:
        """Return the parameters, and what else must be equal on all ranks, by name. They are not copies."""
        ...

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """Overwrite the parameters with `values`, host or device arrays of the same names, shapes and dtypes.

        Copies the values: the caller changes them later.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return parameters and optimizer state for a checkpoint: nested dicts of arrays and numbers, by name."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Reverse `state`. Raise CheckpointError, before anything is overwritten, if `state` does not fit."""
        ...


class Adapter(LocalModel, Protocol):
    """One replica of the model, and its steps."""

    @property
    def loss_scale(self) -> LossScale | None:
        """The factor of the gradients that are handed in; None: they are not scaled.

        The strategy divides by it, updates it, and skips a step if the scale made gradients infinite.
        """
        ...

    @property
    def precision(self) -> numpy.dtype:
        """The narrowest dtype in which losses and gradients are computed."""
        ...

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """Return this rank's mean loss over its batch, and hand in every gradient on the way, in any order.

        A batch of no samples gives loss 0 and gradients of zeros.
        """
        ...

    def note(self) -> Any:
        """Return what every rank must know of this rank's last `loss_and_gradients`, besides gradients; None: nothing.

        The note may be any value that can be pickled, if equal notes have an equal repr and others do not. The note of
        a worker comes to its server over a network. If the adapter has a method `check_note(note)`, the server calls it
        first; the method raises GradientError for what `note` cannot have returned.
        """
        ...

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array], remarks: Remarks) -> float:
        """Make one step of the optimizer, with mean gradients in flat buffers by dtype, in layout order.

        The buffers are on the host or where the parameters are, and may be overwritten. `remarks` says which parameters
        no rank has used, and what the ranks have noted. The mean gradient of a parameter that no rank has used is 0.
        Return the learning rate that was used.
        """
        ...

    def measure_gradient_norm(self) -> None:
        """Let the next `apply_gradients` measure the norm of the mean gradient."""
        ...

    def gradient_norm(self) -> float | None:
        """Return the 2-norm of the last `apply_gradients`, over all parameters, before clipping; None: not measured."""
        ...


@runtime_checkable
class DividedAdapter(Adapter, Protocol):
    """An Adapter whose parameters can be divided between several servers. Each server has the whole model, and updates
    a part of it."""

    def divisions(self, num_servers: int) -> tuple[Division, Division]:
        """Return how `layout` and how `parameters` are divided between so many servers, the same in every process.

        What `layout` and `parameters` both have is on the same server in both.
        """
        ...

    def dividable_optimizer(self) -> str:
        """Return class and settings of the optimizer, before any restore. They must be equal on all servers.

        Raises:
            ConfigError: the optimizer cannot update a part.
        """
        ...

    def update_only(self, number: int, num_servers: int, norm_of_all: Callable[[float], float]) -> None:
        """Let `apply_gradients` change only the part of a server, and take flat buffers of this part alone.

        Args:
            number: of the server; the first one is 0.
            norm_of_all: `apply_gradients` calls it where it needs the norm of the gradients, with the norm of the
                part's. It returns the norm of the gradients of all parts.

        Raises:
            ConfigError: as for `dividable_optimizer`.
        """
        ...

    def plan_update(self) -> dict[str, Any]:
        """Return what all servers must know of the next update, as JSON can hold it: the number of the step, the
        learning rate, whether the norm is needed."""
        ...

    def follow_plan(self, plan: Mapping[str, Any]) -> None:
        """Let the next `apply_gradients` make the update of a `plan_update`."""
        ...

    def part_state(self, number: int) -> dict[str, Any]:
        """Return parameters and optimizer state of the part of a server, by name: arrays, and what JSON can hold.

        The arrays are not copies. `update_only` comes before.
        """
        ...

    def take_part_state(self, number: int, state: Mapping[str, Any], gone: Sequence[str]) -> None:
        """Copy what `part_state` has returned, or some of it, from the same model in another process.

        `gone` are names that are not in it any more.
        """
        ...


class OptimizerShard(Protocol):
    """The part of an optimizer that one rank has: its state for the elements that the rank owns. Nothing communicates.

    While there is one, `apply_gradients` of the adapter changes no parameter. It writes the new values of the owned
    elements into the flat buffers, over their gradients; the other elements of the buffers may have any values.
    `restore` takes the state of the whole optimizer, as from an adapter without a shard.
    """

    @property
    def settings(self) -> str:
        """The optimizer in a text, as it is now. Equal texts and equal rates, equal updates."""
        ...

    @property
    def was_skipped(self) -> bool:
        """Whether the last update had gradients, and none was left when the optimizer made its step."""
        ...

    def take_updated(self, flats: Mapping[numpy.dtype, Array]) -> None:
        """Take in the flat buffers of the last `apply_gradients`, with what all owners have written."""
        ...

    def values(self) -> dict[str, Any]:
        """Return the part's state without the arrays of `array`, for `lend`: what pickle can write."""
        ...

    def array_names(self) -> list[str]:
        """Return the names of the state's arrays that have an entry for each element."""
        ...

    def array(self, name: str) -> dict[numpy.dtype, Array]:
        """Return an array of the state for the owned elements, by dtype of the flat buffers. What is missing is 0."""
        ...

    def lend(self, values: Sequence[dict[str, Any]], arrays: Mapping[str, Mapping[numpy.dtype, Array]]) -> None:
        """Let `state` of the adapter return the state of the whole optimizer, until the next `apply_gradients`.

        Args:
            values: by rank.
            arrays: of all elements, flat, by name and dtype of the flat buffers.
        """
        ...

    def begin_step(self) -> None:
        """Forget what takes the memory of the whole optimizer: what was lent, and the state before the division."""
        ...

    def close(self) -> None:
        """Let the optimizer be used for whole parameters again. No step follows.

        It has no state; one of PyTorch for which no step has begun has that from before the division.
        """
        ...


@runtime_checkable
class ShardedAdapter(Adapter, Protocol):
    """An Adapter whose optimizer can be divided between ranks. Each rank has the whole model, and updates a part."""

    def shard(self, owned: Owned, norm_of_all: Callable[[float], float]) -> OptimizerShard:
        """Keep the state of the optimizer for the owned elements only, from now on.

        Args:
            owned: ranges of the flat buffers of `layout`.
            norm_of_all: `apply_gradients` calls it where it needs the norm of the gradients, with the norm of those of
                the owned elements. It returns the norm of the gradients of all.

        Raises:
            ConfigError: the optimizer cannot do this, or it is divided already.
        """
        ...


@runtime_checkable
class ScaledAdapter(Adapter, Protocol):
    """An Adapter whose learning rate can be multiplied by a number, in one step."""

    def scale_next_rate(self, factor: float) -> None:
        """Let the next `apply_gradients` multiply its learning rate by this number, a finite one of at least 0.

        Raises:
            ConfigError: the optimizer cannot do this.
        """
        ...


@runtime_checkable
class SeededAdapter(Adapter, Protocol):
    """An Adapter whose model can draw the random numbers of a virtual rank."""

    def seeded(self, key: tuple[int, ...]) -> AbstractContextManager[None]:
        """Return a block in which `loss_and_gradients` draws random numbers that depend on the key alone.

        After it, random numbers continue as if the block had not been.
        """
        ...


class AdapterAround:
    """An Adapter that gives the calls of Adapter on to another one, `_inner`. Its subclasses change some of them.

    Attributes:
        divides_as_inner: `divided_of` and `sharded_of` return the inner one, which has the whole model and optimizer.
    """

    divides_as_inner = False

    @property
    def _inner(self) -> Any:
        raise NotImplementedError

    @property
    def layout(self) -> Sequence[Parameter]:
        """See LocalModel."""
        layout: Sequence[Parameter] = self._inner.layout
        return layout

    @property
    def loss_scale(self) -> LossScale | None:
        """See Adapter."""
        scale: LossScale | None = self._inner.loss_scale
        return scale

    @property
    def precision(self) -> numpy.dtype:
        """See Adapter."""
        precision: numpy.dtype = self._inner.precision
        return precision

    def parameters(self) -> dict[str, Array]:
        """See LocalModel."""
        parameters: dict[str, Array] = self._inner.parameters()
        return parameters

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See LocalModel."""
        self._inner.load_parameters(values)

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """See Adapter."""
        return float(self._inner.loss_and_gradients(batch, on_gradient))

    def note(self) -> Any:
        """See Adapter."""
        return self._inner.note()

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array], remarks: Remarks) -> float:
        """See Adapter."""
        return float(self._inner.apply_gradients(flats, remarks))

    def scale_next_rate(self, factor: float) -> None:
        """See ScaledAdapter.

        Raises:
            ConfigError: the inner adapter cannot do this.
        """
        scaled_of(self._inner).scale_next_rate(factor)

    def measure_gradient_norm(self) -> None:
        """See Adapter."""
        self._inner.measure_gradient_norm()

    def gradient_norm(self) -> float | None:
        """See Adapter."""
        norm: float | None = self._inner.gradient_norm()
        return norm

    def state(self) -> dict[str, Any]:
        """See LocalModel."""
        state: dict[str, Any] = self._inner.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """See LocalModel."""
        self._inner.restore(state)


def seeded_of(adapter: Adapter) -> SeededAdapter:
    """Return an adapter that can compute virtual ranks.

    Raises:
        ConfigError: this one cannot.
    """
    if not isinstance(adapter, SeededAdapter):
        raise ConfigError(
            f"{type(adapter).__name__} has no method seeded(key), so virtual ranks cannot have random numbers of their "
            "own; ArrayFunction and TorchModule have it"
        )
    return adapter


def scaled_of(adapter: Adapter) -> ScaledAdapter:
    """Return an adapter whose learning rate can be multiplied.

    Raises:
        ConfigError: this one's cannot.
    """
    if not isinstance(adapter, ScaledAdapter):
        raise ConfigError(
            f"{type(adapter).__name__} has no method scale_next_rate(factor), so the learning rate of one step cannot "
            "be multiplied; ArrayFunction and TorchModule have it"
        )
    return adapter


def sharded_of(adapter: Adapter) -> ShardedAdapter:
    """Return an adapter whose optimizer can be divided between ranks: this one, or the one that it is around.

    Raises:
        ConfigError: this one's cannot.
    """
    adapter = _that_divides(adapter)
    if not isinstance(adapter, ShardedAdapter):
        raise ConfigError(
            f"{type(adapter).__name__} has no method shard, so its optimizer cannot be divided between ranks; "
            "ArrayFunction and TorchModule have it. Use mt.Sync"
        )
    return adapter


def divided_of(adapter: Adapter) -> DividedAdapter:
    """Return an adapter that can be divided between servers: this one, or the one that it is around.

    Raises:
        ConfigError: this one cannot.
    """
    adapter = _that_divides(adapter)
    if not isinstance(adapter, DividedAdapter):
        raise ConfigError(
            f"several servers divide the parameters, and {type(adapter).__name__} has not all methods of "
            "DividedAdapter; ArrayFunction and TorchModule have them. Start one server"
        )
    return adapter


def _that_divides(adapter: Adapter) -> Adapter:
    while isinstance(adapter, AdapterAround) and adapter.divides_as_inner:
        adapter = adapter._inner
    return adapter


def check_fits(subject: str, saved: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Raise CheckpointError, which begins with `subject`, unless both have the same names, shapes and dtypes."""
    kinds = [{name: (value.shape, value.dtype) for name, value in values.items()} for values in (saved, expected)]
    for name in [*expected, *saved]:
        if kinds[0].get(name) != kinds[1].get(name):
            raise CheckpointError(
                f"{subject}: the checkpoint has {_kind_text(kinds[0].get(name))} for {name}, the model "
                f"{_kind_text(kinds[1].get(name))}; is it a checkpoint of this model?"
            )


def _kind_text(kind: tuple[tuple[int, ...], numpy.dtype] | None) -> str:
    return "nothing" if kind is None else f"{kind[1]} {kind[0]}"
