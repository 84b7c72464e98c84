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

# Called with a parameter's index and its gradient, as soon as the backward pass has computed it. The gradient is None
# if the loss does not depend on the parameter.
OnGradient: TypeAlias = Callable[[int, Array | None], None]


class LocalModel(Protocol):
    """The parameters and the optimizer of this rank. No method communicates; every rank makes the same calls."""

    @property
    def layout(self) -> Sequence[Parameter]:
        """The name, shape and dtype of every parameter. A parameter's index is its position here.

        It lists the trained parameters, and then everything else that changes by a mean over the samples, such as
        running means. An adapter with such buffers has their number as `num_buffers`. A server with stale gradients
        applies their changes scaled down.
        """
        ...

    def parameters(self) -> dict[str, Array]:
        """Return the parameters, and everything else that must be equal on all ranks, by name. They are not copies."""
        ...

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """Overwrite the parameters with `values`, CPU or GPU arrays of the same names, shapes and dtypes.

        The values are copied, because the caller changes them later.
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
        """The factor by which the gradients are scaled; None: they are not scaled.

        The strategy divides by it, updates it, and skips a step if the scale made gradients infinite.
        """
        ...

    @property
    def precision(self) -> numpy.dtype:
        """The narrowest dtype in which losses and gradients are computed."""
        ...

    def loss_and_gradients(self, batch: Tree, on_gradient: OnGradient) -> float:
        """Return this rank's mean loss over its batch, and call `on_gradient` for every gradient, in any order.

        A batch of no samples gives loss 0 and gradients of zeros.
        """
        ...

    def note(self) -> Any:
        """Return what all ranks must know of this rank's last `loss_and_gradients` besides gradients; None: nothing.

        The note may be any value that can be pickled, provided that two notes have the same repr if and only if they
        are equal. A worker's note reaches its server over a network. If the adapter has a method `check_note(note)`,
        the server calls it first; the method raises GradientError for a value that `note` cannot have returned.
        """
        ...

    def apply_gradients(self, flats: Mapping[numpy.dtype, Array], remarks: Remarks) -> float:
        """Make one step of the optimizer with the mean gradients, which are in flat buffers by dtype, in layout order.

        The buffers are on the CPU or on the device of the parameters, and may be overwritten. `remarks` lists the
        parameters that no rank has used, and the ranks' notes. The mean gradient of a parameter that no rank has used
        is 0. Return the learning rate that was used.
        """
        ...

    def measure_gradient_norm(self) -> None:
        """Make the next `apply_gradients` measure the norm of the mean gradient."""
        ...

    def gradient_norm(self) -> float | None:
        """Return the 2-norm of the last `apply_gradients`, over all parameters, before clipping; None: not measured."""
        ...


@runtime_checkable
class DividedAdapter(Adapter, Protocol):
    """An Adapter whose parameters can be divided between several servers. Each server has the whole model, and updates
    a part of it."""

    def divisions(self, num_servers: int) -> tuple[Division, Division]:
        """Return how `layout` and `parameters` are divided between this many servers, the same in every process.

        An entry of both `layout` and `parameters` is on the same server in both.
        """
        ...

    def dividable_optimizer(self) -> str:
        """Return the optimizer's class and settings, before any restore. They must be equal on all servers.

        Raises:
            ConfigError: the optimizer cannot update a part.
        """
        ...

    def update_only(self, number: int, num_servers: int, norm_of_all: Callable[[float], float]) -> None:
        """Make `apply_gradients` change only the part of a server, and take flat buffers of this part only.

        Args:
            number: of the server; the first one is 0.
            norm_of_all: `apply_gradients` calls it with the norm of the part's gradients, if it needs the norm. It
                returns the norm of the gradients of all parts.

        Raises:
            ConfigError: as for `dividable_optimizer`.
        """
        ...

    def plan_update(self) -> dict[str, Any]:
        """Return what all servers must know about the next update, as JSON values: the number of the step, the
        learning rate, whether the norm is needed."""
        ...

    def follow_plan(self, plan: Mapping[str, Any]) -> None:
        """Make the next `apply_gradients` follow the result of `plan_update`."""
        ...

    def part_state(self, number: int) -> dict[str, Any]:
        """Return parameters and optimizer state of the part of a server, by name: arrays and JSON values.

        The arrays are not copies. Call `update_only` first.
        """
        ...

    def take_part_state(self, number: int, state: Mapping[str, Any], gone: Sequence[str]) -> None:
        """Copy the result of `part_state`, or some of it, from the same model in another process.

        `gone` lists names that are no longer in it.
        """
        ...


class OptimizerShard(Protocol):
    """One rank's part of an optimizer: its state for the elements that the rank owns. No method communicates.

    While a shard exists, `apply_gradients` of the adapter changes no parameter. It overwrites the gradients of the
    owned elements in the flat buffers with their new values; the other elements of the buffers may have any values.
    `restore` takes the state of the whole optimizer, as from an adapter without a shard.
    """

    @property
    def settings(self) -> str:
        """A text that describes the optimizer as it is now. Equal texts and equal learning rates give equal updates."""
        ...

    @property
    def was_skipped(self) -> bool:
        """Whether the last update had gradients, but none remained when the optimizer made its step."""
        ...

    def take_updated(self, flats: Mapping[numpy.dtype, Array]) -> None:
        """Copy the new values from the flat buffers of the last `apply_gradients`, which all owners have written."""
        ...

    def values(self) -> dict[str, Any]:
        """Return the part's state without the arrays of `array`, for `lend`: an object that pickle can write."""
        ...

    def array_names(self) -> list[str]:
        """Return the names of the state's arrays that have an entry for each element."""
        ...

    def array(self, name: str) -> dict[numpy.dtype, Array]:
        """Return an array of the state for the owned elements, by dtype of the flat buffers. Missing entries are 0."""
        ...

    def lend(self, values: Sequence[dict[str, Any]], arrays: Mapping[str, Mapping[numpy.dtype, Array]]) -> None:
        """Make `state` of the adapter return the state of the whole optimizer, until the next `apply_gradients`.

        Args:
            values: by rank.
            arrays: of all elements, flat, by name and dtype of the flat buffers.
        """
        ...

    def begin_step(self) -> None:
        """Free what takes the memory of the whole optimizer: the lent state, and the state from before the division."""
        ...

    def close(self) -> None:
        """Make the optimizer usable for whole parameters again. No step of this object follows.

        The optimizer then has no state. A PyTorch optimizer for which no step has begun has its state from before the
        division.
        """
        ...


@runtime_checkable
class ShardedAdapter(Adapter, Protocol):
    """An Adapter whose optimizer can be divided between ranks. Each rank has the whole model, and updates a part."""

    def shard(self, owned: Owned, norm_of_all: Callable[[float], float]) -> OptimizerShard:
        """Keep the state of the optimizer for the owned elements only, from now on.

        Args:
            owned: ranges of the flat buffers of `layout`.
            norm_of_all: `apply_gradients` calls it with the norm of the owned elements' gradients, if it needs the
                norm. It returns the norm of all gradients.

        Raises:
            ConfigError: the optimizer cannot do this, or it is divided already.
        """
        ...


@runtime_checkable
class ScaledAdapter(Adapter, Protocol):
    """An Adapter whose learning rate can be multiplied by a number, in one step."""

    def scale_next_rate(self, factor: float) -> None:
        """Make the next `apply_gradients` multiply its learning rate by this finite number of at least 0.

        Raises:
            ConfigError: the optimizer cannot do this.
        """
        ...


@runtime_checkable
class SeededAdapter(Adapter, Protocol):
    """An Adapter whose model can draw the random numbers of a virtual rank."""

    def seeded(self, key: tuple[int, ...]) -> AbstractContextManager[None]:
        """Return a block in which `loss_and_gradients` draws random numbers that depend on the key alone.

        After the block, random numbers continue as if it had drawn none.
        """
        ...


class AdapterAround:
    """An Adapter that passes the calls of Adapter on to another one, `_inner`. Subclasses change some of them.

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
    """Return an adapter whose optimizer can be divided between ranks: this one, or the one inside it.

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
    """Return an adapter that can be divided between servers: this one, or the one inside it.

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
