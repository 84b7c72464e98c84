"""Gradients of a prepared model with local updates: each rank uses its own, and an outer step follows optimizer.step().

    backward()         p.grad holds this rank's gradients; the ranks tell each other only whether they can be used
    optimizer.step()   this rank's step; after the last one of a round, the outer step

See mpitrain/strategies/outer_steps.py. The samples of a step are those of all batches with backward passes since the
previous step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch

from mpitrain.adapters.adapter import check_fits
from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.adapters.torch_state import check_optimizer_state, optimizer_state, restore_optimizer_state
from mpitrain.adapters.torch_trained import ModuleTensors, Trained
from mpitrain.arrays import Array
from mpitrain.errors import GradientError
from mpitrain.reducer.alone import AloneExchange
from mpitrain.reducer.bucket import Parameter
from mpitrain.state.resume import add_up
from mpitrain.strategies.local_updates import ONE_BUCKET, LocalUpdates
from mpitrain.torch.batches import mapped
from mpitrain.torch.gradients import Gradients, trained_of
from mpitrain.torch.loop_buffers import OwnBuffers
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.world.world import World


class LoopModel(ModuleTensors):
    """See LocalModel. The training loop steps the optimizer. This object does not keep the module alive."""

    def __init__(self, trained: Trained, buffers: ModuleBuffers, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(trained, buffers)
        self._optimizer = optimizer
        self._floats = buffers.layout()

    @property
    def layout(self) -> Sequence[Parameter]:
        """See LocalModel: the trained parameters, then the floating buffers."""
        return [*self._trained.layout, *self._floats]

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See LocalModel. The changes of buffers are counted from these values."""
        super().load_parameters(values)
        self._buffers.keep_all()

    def state(self) -> dict[str, Any]:
        """See LocalModel: `parameters`, and `optimizer` as of `optimizer_state`."""
        return {
            "parameters": self.parameters(),
            "optimizer": optimizer_state(self._optimizer, self._trained.named),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See LocalModel."""
        check_fits("parameters", state["parameters"], self.parameters())
        check_optimizer_state(self._optimizer, self._trained.named, state["optimizer"])
        restore_optimizer_state(self._optimizer, self._trained.named, state["optimizer"])
        self.load_parameters(state["parameters"])


@uncompiled
class LocalGradients(Gradients):
    """See Gradients. All ranks also make the same steps of the optimizer."""

    kept = "each rank's own state with local updates"
    instead = (
        "All ranks begin with the parameters of the last outer step and the state of its outer optimizer. What was "
        "learned since then goes into the next outer step"
    )

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: ShardedData,
        strategy: LocalUpdates,
    ) -> None:
        """Collective. Raises what OuterSteps raises.

        The strategy has no warm-up, and the optimizer has all trained parameters.
        """
        buffers, trained = ModuleBuffers(model), trained_of(world, model)
        self._own_buffers = OwnBuffers(buffers)
        self.rounds = str(strategy.schedule)
        # First, because it may raise: the hooks that follow cannot be removed.
        self._outer_steps = strategy.outer_steps(world, LoopModel(trained, buffers, optimizer))
        super().__init__(
            world,
            model,
            data,
            exchange=AloneExchange,
            bucket_bytes=ONE_BUCKET,
            threaded=False,
            buffers=self._own_buffers,
            trained=trained,
        )
        self._samples = 0.0  # or another weight of this rank's batches, since its last step
        self._counted = 0  # the newest batch among them; 0: none
        self._is_open = False  # a step has begun
        self._update: AbstractContextManager[None] | None = None  # around a step of the optimizer that is being made
        self._has_told = False

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """See Gradients: only the optimizer of prepare() makes the steps of a round."""
        return optimizer is self.optimizer()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """See Gradients. A closure is not waited for: its backward pass will be refused."""
        self.check_step(optimizer)

    def check_step(self, optimizer: torch.optim.Optimizer, *, again: bool = False) -> None:
        """See Gradients. The step of the optimizer begins."""
        super().check_step(optimizer, again=again)
        self._check_closed()
        if self._cause is not None:  # the optimizer has a GradScaler's flag, and skips the step
            return
        if not self._counted:
            raise GradientError(
                f"{self._world.name()}: optimizer.step() came without a backward() since the last step; with "
                "local updates, each step needs new gradients"
            )
        samples = self._samples
        self._forget_batches()
        self._is_open = False
        self._steps.add(None)
        update = self._outer_steps.around_update(samples, self._total)
        update.__enter__()
        self._update = update

    def after_step(self, *_: Any) -> None:
        """End the step of the optimizer, with an outer step if it is due. This is the optimizer's post-hook.

        Raises:
            NonFiniteError: see Fragment.finish. Raised on every rank. Parameters and optimizer are as before the step.
        """
        update, self._update = self._update, None
        if update is not None:
            update.__exit__(None, None, None)

    def end_round(self) -> None:
        """See Gradients."""
        self._check_closed()
        self._forget_batches()
        self._is_open = False
        self._outer_steps.end_round()

    def tell_of_round(self) -> None:
        """See Gradients."""
        if not self._has_told and not self._outer_steps.replicas_are_equal:
            self._has_told = True
            self._world.print(
                "mpitrain: state_dict() in the middle of a round: each rank has its own parameters, and "
                "state_dict() returns those. For the common ones, call mpitrain.torch.end_round(model) first, "
                "on every rank"
            )

    def state(self) -> dict[str, Any]:
        """Return all that this rank needs to continue: `own`, and on rank 0 the shared state: `common`. Collective.

        Raises:
            NonFiniteError: see Fragment.finish. Raised on every rank.
        """
        state = {"own": to_tensors(self._outer_steps.whole_own_state())}
        if self._world.is_root:
            state["common"] = to_tensors(self._outer_steps.state())
        return {"rounds": self.rounds, "place": self._outer_steps.place, **state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Gradients. `state` also has rank 0's `common`. This rank's parameters and optimizer are overwritten."""
        self._outer_steps.restore(to_arrays(state["common"]))
        self._outer_steps.restore_own(to_arrays(state["own"]))

    def restore_elsewhere(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """See Gradients. All ranks begin with the parameters of the last outer step, and its outer optimizer.

        What the saved ranks would have added to the next outer step is divided among the present ranks.
        """
        total: dict[str, Any] = {"carried": {}}
        for of_rank in of_ranks[self._world.rank :: self._world.size]:
            add_up(total, to_arrays({key: of_rank["own"].get(key, {}) for key in ("residual", "carried")}))
        self._outer_steps.restore(to_arrays(of_ranks[0]["common"]))
        self._outer_steps.restore_own(total)

    def _begin(self) -> None:
        self._check_closed()
        super()._begin()

    def _weight(self) -> float:
        self._count_batch()
        return self._samples

    def _came(self, index: int, parameter: torch.Tensor) -> None:
        if self._accumulating:
            self._count_batch()
        super()._came(index, parameter)

    def _finish(self) -> None:
        super()._finish()
        if self._cause is not None:  # this step will be skipped
            self._forget_batches()

    def _drop_refused(self) -> None:
        super()._drop_refused()
        if not self._reducer.is_begun:
            self._forget_batches()

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Leave out the gradient of a sample that does not count. This is the tensor's hook."""
        self._share_now()
        return torch.zeros_like(gradient) if self.data.weight.is_nothing else None

    def _forget_batches(self) -> None:
        """Make no batch count for the next step. The current one counts again with its next backward pass."""
        self._samples = self._counted = 0

    def _count_batch(self) -> None:
        """Begin a step, if none has begun. Count the samples of a batch once, however many backward passes it has."""
        if not self._is_open:
            # The common state is from before the forward pass, which has changed running means.
            with self._own_buffers.as_before():
                self._outer_steps.begin_step()
            self._is_open = True
        if self._counted != self.data.turn:
            share = self._share_now()
            self._counted = self.data.turn
            self._samples += self.data.weight.now()
            self._own_buffers.passed(share)

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do not note what the step uses: it belongs to this rank alone."""

    def _end_of_data(self) -> None:
        """Leave parameters and buffers unchanged: they belong to this rank alone until an outer step."""

    def _check_closed(self) -> None:
        if self._update is not None:
            raise GradientError(
                f"{self._world.name()}: a step of the optimizer has not ended. Either an error has ended it in the "
                "middle, and parameters differ between ranks: start again from a checkpoint. Or backward() came inside "
                "optimizer.step(closure): call backward() before, and step() without a closure"
            )


def to_tensors(state: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples of arrays and numbers, with tensors in place of arrays.

    torch.save and torch.load(weights_only=True) need that.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, numpy.ndarray):
            return tensor_of(leaf.copy())
        return leaf.item() if isinstance(leaf, numpy.generic) else leaf

    return mapped(state, one)


def to_arrays(state: Any) -> Any:
    """Return a copy, with arrays in place of tensors."""
    return mapped(state, lambda leaf: array_of(leaf).copy() if isinstance(leaf, torch.Tensor) else leaf)
