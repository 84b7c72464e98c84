"""One rank's part of a TorchModule's optimizer: a piece of each parameter of which it owns elements.

    parameter     |      weight      | bias |
    rank 0 owns   |  piece  |               |     the optimizer has one-dimensional tensors of these elements
    rank 1 owns             | piece  |piece |     in place of the parameters

An optimizer that treats each element by itself makes the same update of pieces as of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from mpitrain.adapters.array_shard import UNDIVIDED
from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.adapters.torch_optimizer import ScheduledOptimizer
from mpitrain.arrays import Array, is_array
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.optim.owned import Owned, size_of, within
from mpitrain.reducer.bucket import Layout

ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
# The state that these keep as one number per parameter; all other state has an entry for each element.
_NUMBERS = ("step", "mu_product", "eta", "mu")


class OwnedPiece(NamedTuple):
    """The elements of one parameter that this rank owns.

    Attributes:
        number: of the parameter, its index.
        place: the range in the parameter, in the parameter's own order.
        there: the same elements in the flat buffer.
        part: their range in the rank's part of the flat buffer.
        tensor: what the optimizer has.
    """

    number: int
    place: slice
    there: slice
    part: slice
    tensor: torch.Tensor


class TorchShard:
    """See OptimizerShard."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduled: ScheduledOptimizer,
        named: Mapping[str, torch.Tensor],
        plan: Layout,
        buffers: ModuleBuffers,
        owned: Owned,
        norm_of_all: Callable[[float], float],
        undone: Callable[[], None],
    ) -> None:
        """
        Args:
            optimizer: has the pieces in place of the parameters, from now on.
            scheduled: around `optimizer`.
            named: the trained parameters, the first ones of `plan`. The others are changes of `buffers`.
            undone: is called when the original state is restored: at `close`, if no step has begun.

        Raises:
            ConfigError: the optimizer needs whole tensors.
        """
        if type(optimizer) not in [getattr(torch.optim, name) for name in ELEMENTWISE]:
            raise ConfigError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} may need whole tensors, and each rank has "
                f"pieces of them; allowed are torch.optim's {', '.join(ELEMENTWISE)}. Use one of these, or mt.Sync"
            )
        self._scheduled, self._named, self._plan, self._buffers = scheduled, named, plan, buffers
        self._owned = owned
        self._before: dict[torch.Tensor, Any] = {}
        self._undo: tuple[Callable[[], None], ...] = ()
        self._whole: dict[str, dict[str, Any]] | None = None
        self.was_skipped = False
        self._pieces: dict[str, OwnedPiece] = {}
        for index, (name, parameter) in enumerate(named.items()):
            dtype = plan.parameters[index].dtype
            ranges = list(within(owned[dtype], slice(*plan.places[index])))
            if not plan.parameters[index].count:  # every rank has all of it
                ranges = [(slice(0, 0), slice(0, 0))]
            begin = plan.places[index][0]
            for place, part in ranges:
                there = slice(begin + place.start, begin + place.stop)
                self._pieces[name] = OwnedPiece(index, place, there, part, _elements(parameter, place))
        state, before = scheduled.state(), dict(optimizer.state)
        self._replace(optimizer)
        undo = scheduled.divide({name: piece.tensor for name, piece in self._pieces.items()}, norm_of_all)
        try:
            self.restore(state)
        except BaseException:
            self._undo, self._before = (undo, undone), before
            self.close()
            raise
        self._undo, self._before = (undo, undone), before  # until a step begins, because an error may come first

    def _replace(self, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in self._named.items()}
        optimizer.state.clear()
        self._optimizer = optimizer
        self._given = [(group, group["params"]) for group in optimizer.param_groups]
        self._groups: dict[str, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            of_group = [names.get(id(parameter), "") for parameter in group["params"]]
            self._groups |= dict.fromkeys(of_group, number)
            group["params"] = [self._pieces[name].tensor for name in of_group if name in self._pieces]

    def update(self, flats: Mapping[numpy.dtype, Array], unused: Collection[int]) -> float:
        """Make a step of the owned elements, and write their new values into `flats`.

        Raises:
            ConfigError: the division has ended, and the state with it.
        """
        if not self._given:
            raise ConfigError(
                "the optimizer was divided between ranks, and its state has gone with the strategy that was closed; "
                "make another TorchModule"
            )
        gradients = []
        for name, piece in self._pieces.items():
            piece.tensor.data = _elements(self._named[name], piece.place)  # the memory may have been replaced
            own = flats[self._plan.parameters[piece.number].dtype][piece.there]
            piece.tensor.grad = None if piece.number in unused else tensor_of(own)
            gradients.append(own)
        had = any(piece.tensor.grad is not None for piece in self._pieces.values())
        rate = self._scheduled.step(gradients)
        self.was_skipped = had and all(piece.tensor.grad is None for piece in self._pieces.values())
        for piece, own in zip(self._pieces.values(), gradients, strict=True):
            piece.tensor.grad = None
            own[...] = array_of(piece.tensor)
        return rate

    def state(self) -> dict[str, Any]:
        """The state of the whole optimizer as from ScheduledOptimizer, while it is lent.

        Raises:
            ConfigError: it is not lent.
        """
        if self._whole is None:
            raise ConfigError(UNDIVIDED)
        state = self._scheduled.state()
        return {**state, "optimizer": {**state["optimizer"], "state": self._whole}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of the state of the whole optimizer, as ScheduledOptimizer.restore does."""
        self._whole = None
        of_whole = state["optimizer"].get("state", {})
        self._check_whole(of_whole)
        self._before, self._undo = {}, ()
        own = {
            name: {key: _cut(key, value, piece.place) for key, value in of_whole[name].items()}
            for name, piece in self._pieces.items()
            if name in of_whole
        }
        self._scheduled.restore({**state, "optimizer": {**state["optimizer"], "state": own}})

    def _check_whole(self, of_whole: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse a state that any rank would refuse for its pieces, so that no rank changes alone."""
        keys: dict[int, set[str]] = {}  # what this rank's pieces have in a group, all of its parameters have
        for name, own in self._own_state().items():
            keys.setdefault(self._groups[name], set(own))
        for name, entry in of_whole.items():
            if name not in self._named:
                raise CheckpointError(
                    f"the checkpoint has optimizer state for {name}; the module has no such parameter"
                )
            expected = keys.get(self._groups[name], set(entry))
            if expected != set(entry):
                raise CheckpointError(
                    f"the checkpoint's optimizer state for {name} is {', '.join(entry)}; this optimizer has "
                    f"{', '.join(sorted(expected))}. Is it the same optimizer?"
                )
            for key, value in entry.items():
                allowed = () if _is_number(key, value) else tuple(self._named[name].shape)
                if numpy.shape(value) != allowed:
                    raise CheckpointError(
                        f"the checkpoint's optimizer state for {name} has {key} of shape {numpy.shape(value)}; that "
                        f"of this module is {allowed}. Is it a checkpoint of this model?"
                    )

    # -- of an OptimizerShard ----------------------------------------------------------------------------------

    @property
    def settings(self) -> str:
        """See OptimizerShard. The groups' options, which a schedule or a hook may have set."""
        return self._scheduled.described()

    def take_updated(self, flats: Mapping[numpy.dtype, Array]) -> None:
        """See OptimizerShard. The mean changes of buffers have arrived with them."""
        views = self._plan.views(dict(flats))
        for parameter, view in zip(self._named.values(), views, strict=False):
            array_of(parameter)[...] = view
        changes = zip(self._plan.parameters, views, strict=True)
        self._buffers.add({entry.name: view for entry, view in list(changes)[len(self._named) :]})

    def values(self) -> dict[str, Any]:
        """See OptimizerShard: by parameter, the numbers; None for an array."""
        return {
            name: {key: value if _is_number(key, value) else None for key, value in entry.items()}
            for name, entry in self._own_state().items()
        }

    def array_names(self) -> list[str]:
        """See OptimizerShard."""
        entries = self._own_state().values()
        return sorted({key for entry in entries for key, value in entry.items() if not _is_number(key, value)})

    def array(self, name: str) -> dict[numpy.dtype, Array]:
        """See OptimizerShard."""
        parts = {dtype: numpy.zeros(size_of(ranges), dtype) for dtype, ranges in self._owned.items()}
        state = self._own_state()
        for parameter, piece in self._pieces.items():
            if name in state.get(parameter, {}):
                parts[self._plan.parameters[piece.number].dtype][piece.part] = state[parameter][name]
        return parts

    def lend(self, values: Sequence[dict[str, Any]], arrays: Mapping[str, Mapping[numpy.dtype, Array]]) -> None:
        """See OptimizerShard."""
        views = {name: self._plan.named(dict(flats)) for name, flats in arrays.items()}
        self._whole = {}
        for parameter in self._named:
            entry = next((of_rank[parameter] for of_rank in values if parameter in of_rank), None)
            if entry is not None:  # the optimizer has already updated it
                self._whole[parameter] = {
                    key: views[key][parameter] if value is None else value for key, value in entry.items()
                }

    def begin_step(self) -> None:
        """See OptimizerShard. Called before the gradients, because these need memory too."""
        self._whole, self._before, self._undo = None, {}, ()

    def close(self) -> None:
        """See OptimizerShard. A second call does nothing: the optimizer may belong to another shard by then."""
        if self._given:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._before)
            self._before = {}
        for group, parameters in self._given:
            group["params"] = parameters
        self._given = []
        for undo in self._undo:
            undo()
        self._undo = ()

    def _own_state(self) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = self._scheduled.state()["optimizer"]["state"]
        return state


def _elements(parameter: torch.Tensor, place: slice) -> torch.Tensor:
    """These elements of a parameter: a view, or a copy if the parameter is not contiguous."""
    return parameter.detach().reshape(-1)[place]


def _is_number(key: str, value: Any) -> bool:
    return key in _NUMBERS or not is_array(value)


def _cut(key: str, value: Any, place: slice) -> Any:
    return value if _is_number(key, value) else value.reshape(-1)[place]
