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
from weakref import WeakMethod, WeakSet

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.adapters.torch_buffers import Values
from mpitrain.adapters.torch_steps import StepsMade
from mpitrain.adapters.torch_trained import Trained, call_weakly
from mpitrain.errors import GradientError, MpitrainError, NonFiniteError, everywhere
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.exchange import Exchange
from mpitrain.reducer.means import Means, Remarks
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.torch.drawn import Share
from mpitrain.torch.loop_buffers import LoopBuffers
from mpitrain.torch.norm_layers import are_prepared
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.world.world import World

_GONE = (
    "a backward pass uses parameters of a model that prepare() was given, but that model and its optimizer no longer "
    "exist, so their gradients are not exchanged; keep a reference to the model"
)
_AFTER_AN_ERROR = (
    "If an error has ended an earlier backward(), gradients differ between ranks: start again from a checkpoint. "
)


class PassNote(NamedTuple):
    """A rank's remarks: parameters that were frozen at prepare() but are not now, or the reverse; see
    LoopBuffers.changed."""

    thawed: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    others: Values = ()


def trained_of(world: World, model: torch.nn.Module) -> Trained:
    """Return the trained parameters of a model that prepare() is given."""
    return Trained(model, "prepare()", world.name())


@uncompiled
class Gradients:
    """The gradients of one model, on one rank. All ranks make the same backward passes.

    Attributes:
        data: its current batch gives their weights.
        kept, instead: texts: what `state` holds, and what happens if it cannot be restored.
        optimizer: returns the optimizer that prepare() was given, while it exists.
        rounds: a text with the settings of the rounds in which the model trains; "" without rounds.
    """

    kept = "what the codec has not sent of the gradients"
    instead = "The next step continues without it"
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
        buffers: LoopBuffers,
        changes: Sequence[Parameter] = (),
        virtual_ranks: int | None = None,
        trained: Trained | None = None,
    ) -> None:
        """Collective: the ranks compare the parameters that have gradients. Raises GradientReducer's errors.

        `changes` are exchanged with the gradients, after them in the layout.
        """
        self._world = world
        self.data = data
        self._trained = trained = trained or trained_of(world, model)
        self._parameters: list[Any] = list(trained.tensors.values())
        self._reducer = GradientReducer(
            world,
            [*trained.layout, *changes],
            exchange=exchange,
            bucket_bytes=bucket_bytes,
            threaded=threaded,
            virtual_ranks=virtual_ranks,
        )
        self._views = [tensor_of(gradient) for gradient in self._reducer.gradients[: len(self._parameters)]]
        self._buffers = buffers
        self._share = Share(1, 1)
        self._in_pass = False  # an exchange has begun and has not ended
        self._accumulating = False
        self._holds_own = False  # True: p.grad may hold gradients accumulated on this rank alone
        self._cause: NonFiniteError | None = None
        self._total = 0.0  # the weight of all ranks in the last exchange
        self._steps = StepsMade(world, trained.tensors)
        self._known = {id(parameter) for parameter in trained.named.values()}
        self._has_stepped: WeakSet[torch.optim.Optimizer] = WeakSet()  # since the last exchange
        self._has_exchanged = False
        self._seen = data.seen  # at the last exchange
        if world.size > 1:
            are_prepared(model)
            data.at_end.append(WeakMethod(self._end_of_data))
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        trained.watch(self._came, gone=_GONE)
        for parameter in self._parameters:
            # Registered now, because a parameter that is frozen later accepts no hook.
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
        """This rank's error-feedback residual; {} if there is none. See GradientReducer.state."""
        state = self._reducer.state()
        if "residual" not in state:
            return {}
        residual = {name: tensor_of(values) for name, values in state["residual"].items()}
        factors = {name: tensor_of(values) for name, values in self._reducer.factors().items()}
        return {"place": state["place"], "residual": residual, "factors": factors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` of this rank in the same position. Raises CheckpointError if it is of another
        model."""
        self._reducer.restore({"residual": {name: array_of(one) for name, one in state["residual"].items()}})
        self._reducer.restore_factors({name: array_of(one) for name, one in state.get("factors", {}).items()})

    def restore_elsewhere(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """Take from the ranks' states, in rank order, what does not belong to one rank: nothing here."""

    def end_round(self) -> None:
        """Give all ranks the same parameters. They have them already, except with local updates. Collective."""

    def tell_of_round(self) -> None:
        """Warn once of a state_dict() while the ranks' parameters differ; see LocalGradients."""

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Check that the optimizer is about to use means, and that they are finite. This is the optimizer's pre-hook.

        If there is a closure, which makes the backward pass, the check follows its return.
        """
        named = dict(kwargs or {})
        closure = named.pop("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.check_step(optimizer)
            return None
        is_counted = False

        def checked() -> Any:
            nonlocal is_counted
            loss = closure()
            self.check_step(optimizer, again=is_counted)
            is_counted = True
            return loss

        return (args[0], checked, *args[2:]), named

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has parameters of this model."""
        return any(id(parameter) in self._known for group in optimizer.param_groups for parameter in group["params"])

    def check_step(self, optimizer: torch.optim.Optimizer, *, again: bool = False) -> None:
        """Check what a step of an optimizer will use, and count the step. `again`: it was already counted.

        Raises:
            GradientError: gradients or parameters are not those of all ranks.
            MismatchError: there was no backward pass since the last step, and the ranks have different gradients.
        """
        if self._in_pass:
            raise GradientError(
                f"{self._world.name()}: optimizer.step() came after a backward() that an error ended in the middle of "
                "its exchange, so gradients differ between ranks; start again from a checkpoint"
            )
        if self._holds_own:
            raise GradientError(
                f"{self._world.name()}: optimizer.step() came while gradients are accumulated on this rank alone; put "
                "the last backward() before a step outside of `with accumulate(model)`"
            )
        for group in optimizer.param_groups if optimizer is self.optimizer() else ():
            for parameter in group["params"]:
                if id(parameter) not in self._known:
                    raise GradientError(
                        f"{self._world.name()}: the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                        "the model did not have at prepare(); its gradient would differ between ranks. Call prepare() "
                        "when the model has all its parameters"
                    )
        # An optimizer with a GradScaler's flag checks this itself.
        if self._cause is not None and getattr(optimizer, "found_inf", None) is None:
            raise self._cause
        if not again:
            self._count_step(optimizer)

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, and note what it uses. If there was no exchange since the last step, the ranks compare that
        now."""
        if self._world.size == 1 or not self._steps.add(optimizer, self._views):
            return
        if optimizer in self._has_stepped or not self._has_exchanged:
            self._world.agree("make a step of the optimizer without a backward() since the step before")
            self._steps.compare()
        self._has_stepped.add(optimizer)

    def _end_of_data(self) -> None:
        """Compare the parameters, and make the buffers equal that no backward pass has made equal. Collective."""
        self._steps.compare_parameters()
        count, total = (now - before for now, before in zip(self.data.seen, self._seen, strict=True))
        if total:
            self._buffers.settle(Share(count, total))
        elif self._has_exchanged:  # a forward pass may have come after the last backward pass
            self._buffers.settle(self._share)
        self._seen = self.data.seen

    def _came(self, index: int, parameter: torch.Tensor) -> None:
        """Take a gradient that is final for this backward pass. This is the parameter's hook."""
        view = self._views[index]
        gradient = parameter.grad
        if gradient is None:  # it was frozen between the forward and the backward pass
            return
        if not self._in_pass and not self._accumulating:
            self._begin()
        if gradient is not view:
            self._trained.check(index, gradient)
            view.copy_(gradient.detach())  # with create_graph=True, the view would otherwise keep every graph alive
            parameter.grad = view
        if self._in_pass:
            self._trained.come(index, _AFTER_AN_ERROR)
            try:
                self._reducer.ready(index, self._reducer.gradients[index])
            except MpitrainError:
                self._drop_refused()
                raise

    def _begin(self) -> None:
        """Begin an exchange at the first gradient of a backward pass, and make the end of the pass wait for it."""
        self._share = self._share_now()
        self.data.weight.check_not_said_elsewhere()
        weight = self._weight()
        self._reducer.begin(weight, turn=self.data.position, steps=self._steps.code, is_said=self.data.weight.is_said)
        self._trained.begin()
        self._in_pass = True
        self._buffers.begin(self._share)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _weight(self) -> float:
        """The weight of this rank in the exchange that begins."""
        # Accumulated gradients have already been multiplied by the shares.
        return 1 if self._holds_own else self.data.weight.now()

    def _finish(self) -> None:
        """End a backward pass. Afterwards every p.grad, and the buffers, are the same on all ranks."""
        try:
            for index, parameter, gradient in self._trained.left():
                view = self._views[index]
                if gradient is not None and gradient is not view:
                    view.copy_(gradient.detach())
                parameter.grad = view
                self._reducer.ready(index, self._reducer.gradients[index] if gradient is not None else None)
            means = self._reducer.finish(may_skip=True, note=self._note(), when_agreed=self._buffers.send)
        except MpitrainError:
            self._drop_refused()
            raise
        self._in_pass = self._holds_own = False
        self._take(means)

    def _drop_refused(self) -> None:
        """Discard an exchange that all ranks refused before it began, so that all can continue with another batch.

        In the middle of an exchange that is impossible, so the exchange stays open.
        """
        if not self._reducer.is_begun:
            self._in_pass = self._holds_own = False
            self._cause = None
            self._steps.forget()
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Remove the gradients, as all ranks do after a common error, so that no step uses this rank's own
        gradients."""
        for parameter in self._trained.named.values():
            parameter.grad = None

    def _note(self) -> PassNote | None:
        """This rank's remarks about the backward pass that is ending."""
        changed = [
            name
            for name, parameter in self._trained.named.items()
            if parameter.requires_grad != (name in self._trained.tensors)
        ]
        thawed = tuple(name for name in changed if name not in self._trained.tensors)
        frozen = tuple(name for name in changed if name in self._trained.tensors)
        note = PassNote(thawed, frozen, *self._buffers.changed())
        return note if any(note) else None

    def _take(self, means: Means) -> None:
        """Take the results of an exchange. The gradients are in their views."""
        self._cause, self._total = means.cause, means.weight
        self._has_exchanged, self._seen = True, self.data.seen
        self._has_stepped.clear()
        notes = [note or PassNote() for note in means.remarks.notes]
        self._buffers.end(sorted({name for note in notes for name in note.floats}), [note.others for note in notes])
        try:
            self._steps.exchanged(means.steps, self._views)
            self._heed(means.remarks, notes)
        except MpitrainError:
            self._drop_gradients()
            raise
        if self._cause is not None:
            self._spoil()

    def _heed(self, remarks: Remarks, notes: Sequence[PassNote]) -> None:
        """Act on the ranks' remarks about this backward pass."""
        thawed = sorted({name for note in notes for name in note.thawed})
        if thawed:
            raise everywhere(
                GradientError(
                    f"{', '.join(thawed)} had requires_grad=False at prepare() and has a gradient now, which would "
                    "differ between ranks. Call prepare() with requires_grad=True, and freeze the parameter afterwards"
                )
            )
        frozen = [set(note.frozen) for note in notes]
        partly = frozen[0].union(*frozen) - frozen[0].intersection(*frozen)
        if partly:
            where = ", ".join(self._world.name(rank) for rank, names in enumerate(frozen) if names & partly)
            raise everywhere(
                GradientError(
                    f"{', '.join(sorted(partly))} has requires_grad=False on some ranks ({where}) and not on others, "
                    "so the mean of its gradient is not over all samples. Freeze a parameter on all ranks, "
                    "before the same batch"
                )
            )
        for index in remarks.unused:  # an unused parameter has no gradient, as in one process
            self._parameters[index].grad = None
        for text in self._trained.report(remarks):
            self._world.print(f"mpitrain: {text}")

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Scale a gradient before it is added to p.grad, if p.grad accumulates several batches. This is the tensor's
        hook."""
        if not (self._accumulating or self._holds_own):
            return None
        self._share_now()
        factor = self.data.weight.part() * self._world.size
        if factor == 0:
            return torch.zeros_like(gradient)
        return None if factor == 1 else gradient * factor

    def _share_now(self) -> Share:
        self.data.check_thread()
        if self.data.share is None:
            raise GradientError(
                f"{self._world.name()}: backward() came while no batch of the prepared data is in use, so the weight "
                "of this rank's gradients is unknown; loop over the data that prepare() returned, and take no batch "
                "ahead, as a prefetcher around it does"
            )
        return self.data.share

    def _spoil(self) -> None:
        """Write NaN into a gradient, so that a GradScaler finds it on every rank. A codec may not pass NaN on."""
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if view.numel() and parameter.grad is not None:
                view.view(-1)[0] = numpy.nan
                return
