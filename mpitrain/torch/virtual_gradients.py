"""The gradients of a prepared model with virtual ranks: a step has one pass for each virtual rank.

    for part in virtual_batches(model, batch):      this rank's virtual ranks, one after the other
        loss(model, part).backward()                p.grad holds the gradients of this one
                                                    the loop asks for the next one: they go to the reducer
    optimizer.step()                                p.grad holds the means over all samples of the batch

See mpitrain/strategies/virtual_ranks.py, which does the same for a Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of
from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.adapters.torch_random import seeded
from mpitrain.errors import ConfigError, DataError, GradientError, MpitrainError
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.means import Remarks
from mpitrain.strategies.virtual_ranks import compare, digest_of, probe_passes
from mpitrain.torch.batches import copied
from mpitrain.torch.gradients import Gradients, PassNote, trained_of
from mpitrain.torch.loop_buffers import ChangedBuffers
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.world.world import World


@uncompiled
class VirtualGradients(Gradients):
    """See Gradients. The data divides its batches into virtual ranks."""

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        data: ShardedData,
        *,
        bucket_bytes: int | None,
        threaded: bool | None,
    ) -> None:
        """Collective. Raises the errors of GradientReducer."""
        assert data.virtual is not None
        self._virtual = data.virtual
        trained = trained_of(world, model)
        self._changed = ChangedBuffers(ModuleBuffers(model), trained.changes_dtype)
        super().__init__(
            world,
            model,
            data,
            exchange=partial(make_exchange, reduction="exact"),
            bucket_bytes=bucket_bytes,
            threaded=threaded,
            buffers=self._changed,
            changes=self._changed.layout,
            virtual_ranks=self._virtual.number,
            trained=trained,
        )
        self._is_computing = False  # a pass is under way
        self._num_came = 0  # gradients of this pass
        self._is_open = False  # a step has begun and has not ended
        self._is_probed = False

    def accumulating(self) -> NoReturn:
        """See Gradients: refused.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"{self._world.name()}: accumulate(model) with virtual ranks; the gradients of each batch are exchanged, "
            "and add up in p.grad from batch to batch. Leave accumulate out"
        )

    def check_step(self, optimizer: torch.optim.Optimizer, *, again: bool = False) -> None:
        """See Gradients."""
        if self._is_open:
            raise GradientError(
                f"{self._world.name()}: optimizer.step() came in the middle of virtual_batches(model, batch), so "
                "gradients differ between ranks. Let the loop over the virtual batches end without break or return, "
                "and put step() after it. If an error has ended it, start again from a checkpoint"
            )
        super().check_step(optimizer, again=again)

    def passes(self, batch: Any) -> Iterator[Any]:
        """Yield the samples of each virtual rank of this rank. See mpitrain.torch.virtual_batches."""
        parts = self._parts(batch)
        if self._is_open:
            raise GradientError(
                f"{self._world.name()}: virtual_batches(model, batch) began before the loop over the one before had "
                "ended; loop over it once for each batch, to the end"
            )
        self._is_open = True
        earlier = {at: one.grad.detach().clone() for at, one in enumerate(self._parameters) if one.grad is not None}
        if not self._is_probed:
            yield from self._probe(parts[0][1])
            self._is_probed = True
        own = self._virtual.of_rank(self._world)
        self._reducer.begin([count for count, _ in parts], turn=self.data.position, steps=self._steps.code)
        try:
            for number, (count, part) in zip(own, parts, strict=True):
                self._changed.begin_pass()
                if count:
                    yield from self._pass(number, part)
                for index, gradient in enumerate(self._gradients(has_samples=bool(count))):
                    self._reducer.ready(index, gradient)
                note = self._note()
                self._changed.put_back()
                if number != own[-1]:
                    self._reducer.next_pass(0.0, note)
            means = self._reducer.finish(may_skip=True, note=note)
        except MpitrainError:
            self._drop_refused()
            raise
        for view, parameter in zip(self._views, self._parameters, strict=True):
            parameter.grad = view
        self._is_open = False
        self._take(means)
        for index, gradient in earlier.items():
            now = self._parameters[index].grad
            self._parameters[index].grad = gradient if now is None else now.add_(gradient)

    def _probe(self, part: Any) -> Iterator[Any]:
        """Yield rank 0's first virtual batch as often as the probe asks for it, and compare what the ranks compute."""
        part = self._world.broadcast_object(copied(part))  # a view would be sent with the whole batch
        passes = probe_passes()
        next(passes)
        try:
            while True:
                self._changed.begin_pass()
                yield from self._pass(0, part)
                digests = {"a buffer": repr(self._changed.changed())}
                names = [entry.name for entry in (*self._trained.layout, *self._changed.layout)]
                for name, gradient in zip(names, self._gradients(has_samples=True), strict=True):
                    digests |= digest_of(f"the gradient of {name}", gradient)
                self._changed.put_back()
                passes.send(digests)
        except StopIteration as end:
            self.data.places.add(self._world, compare(self._world, end.value))

    def _pass(self, number: int, part: Any) -> Iterator[Any]:
        """Yield the samples of one virtual rank to the loop. Afterwards p.grad holds its gradients."""
        self._trained.forget_gradients()
        self._is_computing, self._num_came = True, 0
        try:
            with seeded(self._virtual.key(self.data.step, number)):
                yield copied(part)
        finally:
            self._is_computing = False
        if not self._num_came:
            raise GradientError(
                f"{self._world.name()}: the loop over virtual_batches(model, batch) made no backward() for virtual "
                f"rank {number}; call it for each of them, even where the loss is not used"
            )

    def _gradients(self, *, has_samples: bool) -> Iterator[numpy.ndarray | None]:
        """Yield the gradients of the pass, in the order of the reducer's layout; None: the loss does not depend on the
        parameter."""
        if not has_samples:
            self._trained.forget_gradients()
        self._trained.begin()
        for _, _, gradient in self._trained.left():
            yield None if gradient is None else array_of(gradient)
        yield from self._changed.floats()

    def _parts(self, batch: Any) -> list[tuple[int, Any]]:
        """Return the number of samples of each virtual rank of this rank, and the samples."""
        share, (length, _) = self._share_now(), self.data.form.described(batch)
        if length != max(share.count, 1):
            raise DataError(
                f"{self._world.name()}: virtual_batches(model, batch) got {length} samples, and the newest batch of "
                f"the prepared data has {max(share.count, 1)} on this rank; give it the batch as it comes"
            )
        ends = list(accumulate(share.virtual))
        return [
            (count, self.data.form.divided(batch, slice(end - count, end)))
            for count, end in zip(share.virtual, ends, strict=True)
        ]

    def _came(self, index: int, parameter: torch.Tensor) -> None:
        """Count a gradient of the current pass. This is the parameter's hook."""
        if not self._is_computing:
            raise GradientError(
                f"{self._world.name()}: backward() came outside of a loop over virtual_batches(model, batch), so "
                f"gradients would depend on the number of ranks (virtual_ranks={self._virtual.number}). Loop over it "
                "for each batch, and call backward() there; or leave virtual_ranks out"
            )
        self._num_came += 1

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Leave a gradient unchanged: its weight is applied in the sum. This is the tensor's hook."""

    def _drop_refused(self) -> None:
        """See Gradients. The buffers are as before the batch."""
        super()._drop_refused()
        if not self._reducer.is_begun:
            self._is_open = False
            self._changed.put_back()

    def _heed(self, remarks: Remarks, notes: Sequence[PassNote]) -> None:
        """See Gradients. The floating buffers are updated, too."""
        super()._heed(remarks, notes)
        if self._cause is None:
            self._changed.add(self._reducer.gradients[len(self._parameters) :])
