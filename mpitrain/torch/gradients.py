"""The gradients of a prepared model: they are exchanged while the backward pass runs, and equal when it returns.

    backward()   a gradient is final -> its place in a bucket -> the bucket is full -> on its way to the other ranks
                 the last one is final -> wait for the buckets -> p.grad holds the mean over all samples of the batch

p.grad is a view of its bucket from then on. The exchange ends with the backward pass, so everything between it and
optimizer.step() sees the means: clipping, GradScaler.unscale_, a look at p.grad.

Every exchange is linear in the earlier content of p.grad, so gradients may be added up over several backward passes as
in one process. `accumulating` leaves the exchange out. Then gradients of batches of different sizes meet in one buffer.
Each is multiplied, as it comes in, by this rank's share of its batch times the number of ranks. Their exchange is the
plain mean over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakMethod

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.adapters.torch_buffers import Values
from mpitrain.adapters.torch_trained import Trained, call_weakly
from mpitrain.errors import GradientError, NonFiniteError, everywhere
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.exchange import Exchange
from mpitrain.exchange.means import Means
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.exchange.remarks import Remarks
from mpitrain.torch.buffer_means import BufferMeans
from mpitrain.torch.changed_buffers import ChangedBuffers
from mpitrain.torch.drawn import Share
from mpitrain.torch.own_buffers import OwnBuffers
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.world import World

_GONE = (
    "a backward pass uses parameters of a model that prepare() was given, but that model and its optimizer no longer "
    "exist, so their gradients are not exchanged; keep a reference to the model"
)


class _Note(NamedTuple):
    """A rank's remarks: parameters that were frozen at prepare() but are not now; see BufferMeans.changed."""

    thawed: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    others: Values = ()


@uncompiled
class Gradients:
    """The gradients of one model, on one rank. All ranks make the same backward passes.

    Attributes:
        data: its present batch weights them.
        kept, instead: what `state` has, and what comes where it cannot be restored, in words.
        rounds: the numbers of the rounds in which the model trains, in words; "" without rounds.
    """

    kept = "what the codec has left out of the gradients"
    instead = "The next step goes on without it"
    rounds = ""

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        data: ShardedData,
        *,
        exchange: Callable[[World], Exchange],
        bucket_bytes: int | None,
        threaded: bool | None,
        buffers: BufferMeans | OwnBuffers | ChangedBuffers,
        changes: Sequence[Parameter] = (),
        virtual_ranks: int | None = None,
    ) -> None:
        """Collective: the ranks compare the parameters that have gradients. Raises the errors of GradientReducer.

        `changes` are exchanged with the gradients, after them in the layout.
        """
        self._world = world
        self.data = data
        self._trained = Trained(model, "prepare()")
        self._names = list(self._trained.tensors)
        self._parameters: list[Any] = list(self._trained.tensors.values())
        self._reducer = GradientReducer(
            world,
            [*self._trained.layout, *changes],
            exchange=exchange,
            bucket_bytes=bucket_bytes,
            threaded=threaded,
            virtual_ranks=virtual_ranks,
        )
        self._views = [tensor_of(gradient) for gradient in self._reducer.gradients[: len(self._parameters)]]
        self._buffers = buffers
        self._share = Share(1, 1)
        self._missing: set[int] | None = None  # gradients that have not come in yet; None between backward passes
        self._accumulating = False
        self._holds_own = False  # True: p.grad may hold gradients that this rank alone has accumulated
        self._cause: NonFiniteError | None = None
        self._total = 0.0  # the weight of all ranks in the last exchange
        self._steps = 0  # of the optimizer; counted only in rounds
        self._trained.watch(self._came, gone=_GONE)
        for parameter in self._parameters:
            # Now, because a parameter that is frozen later accepts no hook.
            parameter.register_hook(partial(call_weakly, WeakMethod(self._scaled), _GONE))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let backward passes in this block add to p.grad on this rank alone. The first one after it exchanges the
        sum."""
        before, self._accumulating = self._accumulating, True
        self._holds_own = True
        try:
            yield
        finally:
            self._accumulating = before

    def state(self) -> dict[str, Any]:
        """What the codec has left out on this rank so far; {} if there is none. See GradientReducer.state."""
        state = self._reducer.state()
        if "residual" not in state:
            return {}
        residual = {name: tensor_of(values) for name, values in state["residual"].items()}
        factors = {name: tensor_of(values) for name, values in self._reducer.factors().items()}
        return {"place": state["place"], "residual": residual, "factors": factors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state` of this rank in an equal place. Raises CheckpointError if it is of another model."""
        self._reducer.restore({"residual": {name: array_of(one) for name, one in state["residual"].items()}})
        self._reducer.restore_factors({name: array_of(one) for name, one in state.get("factors", {}).items()})

    def restore_elsewhere(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """Take of the states of other ranks, in rank order, what does not belong to a rank: nothing here."""

    def end_round(self) -> None:
        """Give all ranks the same parameters: they have them, except in rounds. Collective."""

    def tell_of_round(self) -> None:
        """Tell once of a state_dict() while the ranks have parameters of their own; see RoundGradients."""

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Check that the optimizer is about to use means, and finite ones. This is the optimizer's pre-hook."""
        if self._missing is not None:
            raise GradientError(
                f"{self._world.name()}: optimizer.step() came after a backward() that an error ended in the middle of "
                "its exchange, so gradients differ between ranks; start again from a checkpoint"
            )
        if self._holds_own:
            raise GradientError(
                f"{self._world.name()}: optimizer.step() came while gradients are accumulated on this rank alone; put "
                "the last backward() before a step outside of `with accumulate(model)`"
            )
        known = set(self._trained.named.values())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in known:
                    raise GradientError(
                        f"{self._world.name()}: the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                        "the model did not have at prepare(); its gradient would differ between ranks. Call prepare() "
                        "when the model has all its parameters"
                    )
        # An optimizer that a GradScaler has given its flag checks this itself.
        if self._cause is not None and getattr(optimizer, "found_inf", None) is None:
            raise self._cause

    def _came(self, index: int, parameter: torch.Tensor) -> None:
        """Take a gradient that is final for this backward pass. This is the parameter's hook."""
        view = self._views[index]
        gradient = parameter.grad
        assert gradient is not None
        if self._missing is None and not self._accumulating:
            self._begin()
        if gradient is not view:
            self._check(index, gradient)
            view.copy_(gradient.detach())  # with create_graph=True, the view would otherwise keep every graph alive
            parameter.grad = view
        if self._missing is not None:
            if index not in self._missing:
                raise GradientError(
                    f"{self._world.name()}: the gradient of {self._names[index]} came twice in one step. If an "
                    "error has ended an earlier backward(), gradients differ between ranks: start again from a "
                    "checkpoint. With torch.utils.checkpoint, pass use_reentrant=False"
                )
            self._reducer.ready(index, self._reducer.gradients[index])
            self._missing.discard(index)

    def _begin(self) -> None:
        """Begin an exchange at the first gradient of a backward pass, and let the end of the pass wait for it."""
        self._share = self._share_now()
        self._reducer.begin(self._weight(), turn=self.data.turn, steps=self._steps)
        self._missing = set(range(len(self._parameters)))
        self._buffers.begin(self._share)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _weight(self) -> float:
        """The weight of this rank in the exchange that begins."""
        # Accumulated gradients have been multiplied by the shares.
        return 1 if self._holds_own else self._share.count

    def _finish(self) -> None:
        """End a backward pass. Afterwards every p.grad, and the buffers, are the same on all ranks."""
        assert self._missing is not None
        for index in self._missing:
            view, parameter = self._views[index], self._parameters[index]
            is_used = parameter.grad is not None
            if is_used and parameter.grad is not view:
                self._check(index, parameter.grad)
                view.copy_(parameter.grad.detach())
            parameter.grad = view
            self._reducer.ready(index, self._reducer.gradients[index] if is_used else None)
        self._missing = None
        means = self._reducer.finish(may_skip=True, note=self._note())
        self._holds_own = False
        self._take(means)

    def _note(self) -> _Note | None:
        """This rank's remarks about the backward pass that ends."""
        thawed = tuple(
            name
            for name, parameter in self._trained.named.items()
            if parameter.requires_grad and name not in self._trained.tensors
        )
        note = _Note(thawed, *self._buffers.changed())
        return note if any(note) else None

    def _take(self, means: Means) -> None:
        """Take what an exchange has told. The gradients lie in their views."""
        self._cause, self._total = means.cause, means.weight
        self._heed(means.remarks)
        if self._cause is not None:
            self._spoil()

    def _heed(self, remarks: Remarks) -> None:
        """Act on the ranks' remarks about this backward pass."""
        notes = [note or _Note() for note in remarks.notes]
        self._buffers.end(sorted({name for note in notes for name in note.floats}), [note.others for note in notes])
        thawed = sorted({name for note in notes for name in note.thawed})
        if thawed:
            raise everywhere(
                GradientError(
                    f"{', '.join(thawed)} had requires_grad=False at prepare() and has a gradient now, which would "
                    "differ between ranks. Call prepare() with requires_grad=True, and freeze the parameter afterwards"
                )
            )
        for index in remarks.unused:  # an unused parameter has no gradient, as in one process
            self._parameters[index].grad = None
        for text in self._trained.report(remarks):
            self._world.print(f"mpitrain: {text}")

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Scale a gradient on its way into p.grad, if p.grad adds up several batches. This is the tensor's hook."""
        if not (self._accumulating or self._holds_own):
            return None
        share = self._share_now()
        if share.count == 0:
            return torch.zeros_like(gradient)
        return None if share.count * self._world.size == share.total else gradient * self._factor(share)

    def _factor(self, share: Share) -> float:
        return share.count * self._world.size / share.total

    def _share_now(self) -> Share:
        if self.data.share is None:
            raise GradientError(
                f"{self._world.name()}: backward() came while no batch of the prepared data is in use, so the weight "
                "of this rank's gradients is unknown; loop over the data that prepare() returned"
            )
        return self.data.share

    def _check(self, index: int, gradient: torch.Tensor) -> None:
        if problem := self._trained.problem(index, gradient):
            raise GradientError(f"{self._world.name()}: {problem}")

    def _spoil(self) -> None:
        """Write NaN into a gradient, so that a GradScaler finds it on every rank. A codec may not pass NaN on."""
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if view.numel() and parameter.grad is not None:
                view.view(-1)[0] = numpy.nan
                return
