"""The gradients of a model that `prepare` has seen: exchanged while the backward pass runs, equal when it returns.

    backward()   a gradient is there -> its place in a bucket -> the bucket is full -> on its way to the other ranks
                 the last one is there -> wait for the buckets -> p.grad holds the mean over all samples of the batch

p.grad is a view of its bucket from then on. The end of the backward pass is the end of the exchange, so what comes
between it and optimizer.step() sees the means: clipping, GradScaler.unscale_, a look at p.grad.

Every exchange is linear in what p.grad held before, so gradients may be added up over several backward passes as in
one process. `accumulating` leaves the exchange out. Then gradients of batches of different sizes meet in one buffer,
each multiplied, as it comes in, by this rank's share of its batch times the number of ranks; their exchange is the
plain mean over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from mpitrain.exchange.exchange import Exchange
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.exchange.remarks import Remarks
from mpitrain.torch.buffer_means import BufferMeans
from mpitrain.torch.sharded import ShardedData, Share
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.world import World

_GONE = (
    "the model and the optimizer that prepare() was given are gone, and this is a backward pass through parameters of "
    "theirs, whose gradients nobody exchanges any more; keep the model"
)


class _Note(NamedTuple):
    """What a rank has noticed: parameters that were frozen at prepare() and are not now; see BufferMeans.changed."""

    thawed: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    others: Values = ()


@uncompiled
class Gradients:
    """Of one model, on one rank. All ranks make the same backward passes."""

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        data: ShardedData,
        *,
        exchange: Callable[[World], Exchange],
        bucket_bytes: int | None,
        threaded: bool | None,
    ) -> None:
        """Collective: the ranks compare the parameters that have gradients. Raises as GradientReducer does."""
        self._world = world
        self._data = data
        self._trained = Trained(model, "prepare()")
        self._names = list(self._trained.tensors)
        self._parameters: list[Any] = list(self._trained.tensors.values())
        self._reducer = GradientReducer(
            world, self._trained.layout, exchange=exchange, bucket_bytes=bucket_bytes, threaded=threaded
        )
        self._views = [tensor_of(gradient) for gradient in self._reducer.gradients]
        self._buffers = BufferMeans(world, model)
        self._share = Share(1, 1)
        self._missing: set[int] | None = None  # not come in yet; None between backward passes
        self._accumulating = False
        self._holds_own = False  # p.grad may hold what has been accumulated on this rank alone
        self._cause: NonFiniteError | None = None
        self._trained.watch(self._came, gone=_GONE)
        for parameter in self._parameters:
            # Now, for one that is frozen later takes none.
            parameter.register_hook(partial(call_weakly, WeakMethod(self._scaled), _GONE))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes in this block add to p.grad on this rank alone; the first one behind it exchanges the sum."""
        before, self._accumulating = self._accumulating, True
        self._holds_own = True
        try:
            yield
        finally:
            self._accumulating = before

    def state(self) -> dict[str, Any]:
        """What the codec has left out on this rank so far; {} if there is none. See GradientReducer.state."""
        state = self._reducer.state()
        if not state:
            return {}
        residual = {name: tensor_of(values) for name, values in state["residual"].items()}
        return {"place": state["place"], "residual": residual}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state` of this rank in an equal place. Raises CheckpointError if it is of another model."""
        self._reducer.restore({"residual": {name: array_of(one) for name, one in state["residual"].items()}})

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """What the optimizer is about to use are means, and finite. Its pre-hook."""
        if self._missing is not None:
            raise GradientError(
                f"{self._world.name()}: optimizer.step() came after a backward() that an error ended in the middle of "
                "its exchange, so gradients differ from rank to rank; start again from a checkpoint"
            )
        if self._holds_own:
            raise GradientError(
                f"{self._world.name()}: optimizer.step() came while gradients are accumulated on this rank alone; the "
                "last backward() before a step belongs outside of `with accumulate(model)`"
            )
        known = set(self._trained.named.values())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in known:
                    raise GradientError(
                        f"{self._world.name()}: the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                        "the model did not have at prepare(), whose gradient would differ from rank to rank. Call "
                        "prepare() when the model has all its parameters"
                    )
        # One that a GradScaler has handed its flag to looks for itself.
        if self._cause is not None and getattr(optimizer, "found_inf", None) is None:
            raise self._cause

    def _came(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient is final for this backward pass. Its hook."""
        view = self._views[index]
        gradient = parameter.grad
        assert gradient is not None
        if self._missing is None and not self._accumulating:
            self._begin()
        if gradient is not view:
            self._check(index, gradient)
            view.copy_(gradient.detach())  # with create_graph=True the memory would keep every graph there was
            parameter.grad = view
        if self._missing is not None:
            if index not in self._missing:
                raise GradientError(
                    f"{self._world.name()}: the gradient of {self._names[index]} came twice in one step. If an "
                    "error has ended a backward() before, gradients differ from rank to rank: start again from a "
                    "checkpoint. With torch.utils.checkpoint, use_reentrant=False"
                )
            self._reducer.ready(index, self._reducer.gradients[index])
            self._missing.discard(index)

    def _begin(self) -> None:
        """The first gradient of a backward pass: begin an exchange, and wait for it at the end of the pass."""
        self._share = self._share_now()
        # What is accumulated has been multiplied by the shares.
        weight = 1 if self._holds_own else self._share.count
        self._reducer.begin(weight, turn=self._data.turn)
        self._missing = set(range(len(self._parameters)))
        self._buffers.begin(self._share)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """The end of a backward pass: afterwards all of p.grad, and the buffers, are the same on all ranks."""
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
        thawed = tuple(
            name
            for name, parameter in self._trained.named.items()
            if parameter.requires_grad and name not in self._trained.tensors
        )
        note = _Note(thawed, *self._buffers.changed())
        means = self._reducer.finish(may_skip=True, note=note if any(note) else None)
        self._holds_own = False
        self._cause = means.cause
        self._heed(means.remarks)
        if self._cause is not None:
            self._spoil()

    def _heed(self, remarks: Remarks) -> None:
        """What the ranks have noticed in this backward pass."""
        notes = [note or _Note() for note in remarks.notes]
        self._buffers.end(sorted({name for note in notes for name in note.floats}), [note.others for note in notes])
        thawed = sorted({name for note in notes for name in note.thawed})
        if thawed:
            raise everywhere(
                GradientError(
                    f"{', '.join(thawed)} had requires_grad=False at prepare() and has a gradient now, which would "
                    "differ from rank to rank. Call prepare() with requires_grad=True, and freeze it afterwards"
                )
            )
        for index in remarks.unused:  # as in one process
            self._parameters[index].grad = None
        for text in self._trained.report(remarks):
            self._world.print(f"mpitrain: {text}")

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """A gradient on its way into p.grad, where that adds up those of several batches. Its hook."""
        if not (self._accumulating or self._holds_own):
            return None
        share = self._share_now()
        if share.count == 0:
            return torch.zeros_like(gradient)
        return None if share.count * self._world.size == share.total else gradient * self._factor(share)

    def _factor(self, share: Share) -> float:
        return share.count * self._world.size / share.total

    def _share_now(self) -> Share:
        if self._data.share is None:
            raise GradientError(
                f"{self._world.name()}: backward() came while no batch of the prepared data is in use, so how much "
                "this rank's gradients count is not known; loop over the data that prepare() returned"
            )
        return self._data.share

    def _check(self, index: int, gradient: torch.Tensor) -> None:
        if problem := self._trained.problem(index, gradient):
            raise GradientError(f"{self._world.name()}: {problem}")

    def _spoil(self) -> None:
        """A codec need not pass NaN on. A GradScaler finds it on every rank or on none."""
        for view, parameter in zip(self._views, self._parameters, strict=True):
            if view.numel() and parameter.grad is not None:
                view.view(-1)[0] = numpy.nan
                return
