"""The gradients of a prepared model in rounds: each rank uses its own, and an outer step follows optimizer.step().

    backward()         p.grad holds this rank's gradients; the ranks tell each other only whether they can be used
    optimizer.step()   this rank's step; after the last one of a round, the outer step

See mpitrain/strategies/meetings.py. The samples of a step are those of the batches with backward passes since the step
before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.adapters.torch_trained import Trained
from mpitrain.errors import GradientError
from mpitrain.exchange.alone import AloneExchange
from mpitrain.strategies.rounds import ONE_BUCKET, Rounds
from mpitrain.torch.gradients import Gradients
from mpitrain.torch.loop_model import LoopModel
from mpitrain.torch.own_buffers import OwnBuffers
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.state_tensors import to_arrays, to_tensors
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.training.checkpoint.parts import add_up
from mpitrain.world import World


@uncompiled
class RoundGradients(Gradients):
    """See Gradients. All ranks also make the same steps of the optimizer."""

    kept = "what each rank has kept for itself in rounds"
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
        strategy: Rounds,
    ) -> None:
        """Collective. Raises what Meetings raises.

        The strategy has no warm-up, and the optimizer has all trained parameters.
        """
        buffers = ModuleBuffers(model)
        self._own_buffers = OwnBuffers(buffers)
        self.rounds = str(strategy.plan)
        # First, since it may raise: the hooks that follow cannot be taken back.
        self._meetings = strategy.meetings(world, LoopModel(Trained(model, "prepare()"), buffers, optimizer))
        super().__init__(
            world,
            model,
            data,
            exchange=AloneExchange,
            bucket_bytes=ONE_BUCKET,
            threaded=False,
            buffers=self._own_buffers,
        )
        self._samples = 0  # of this rank, since its last step
        self._counted = 0  # the newest batch among them; 0: none
        self._is_open = False  # a step has begun
        self._update: AbstractContextManager[None] | None = None  # around a step of the optimizer that is being made
        self._has_told = False

    def before_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """See Gradients. The step of the optimizer begins. This is the optimizer's pre-hook."""
        super().before_step(optimizer, *arguments)
        self._check_closed()
        if self._cause is not None:  # the optimizer has the flag of a GradScaler, and leaves the step out
            return
        if not self._is_open:
            raise GradientError(
                f"{self._world.name()}: optimizer.step() came without a backward() since the last step; in rounds, "
                "each step has gradients of its own"
            )
        samples = self._samples
        self._forget_batches()
        self._is_open = False
        self._steps += 1
        update = self._meetings.around_update(samples, self._total)
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
        self._meetings.end_round()

    def tell_of_round(self) -> None:
        """See Gradients."""
        if not self._has_told and not self._meetings.replicas_are_equal:
            self._has_told = True
            self._world.print(
                "mpitrain: state_dict() in the middle of a round: each rank has parameters of its own, and gets those. "
                "Call mpitrain.torch.end_round(model) first, on every rank, and all get the common ones"
            )

    def state(self) -> dict[str, Any]:
        """All that this rank needs to go on: `own`; and on rank 0 what is the same on all ranks: `common`. Collective.

        Raises:
            NonFiniteError: see Fragment.finish. Raised on every rank.
        """
        state = {"own": to_tensors(self._meetings.whole_own_state())}
        if self._world.is_root:
            state["common"] = to_tensors(self._meetings.state())
        return {"rounds": self.rounds, "place": self._meetings.place, **state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Gradients. `state` also has rank 0's `common`. This rank's parameters and optimizer are overwritten."""
        self._meetings.restore(to_arrays(state["common"]))
        self._meetings.restore_own(to_arrays(state["own"]))

    def restore_elsewhere(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """See Gradients. All ranks begin with the parameters of the last outer step, and its outer optimizer.

        What the ranks would have added to the next one is divided among these ranks.
        """
        total: dict[str, Any] = {"carried": {}}
        for of_rank in of_ranks[self._world.rank :: self._world.size]:
            add_up(total, to_arrays({key: of_rank["own"].get(key, {}) for key in ("residual", "carried")}))
        self._meetings.restore(to_arrays(of_ranks[0]["common"]))
        self._meetings.restore_own(total)

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
        if self._cause is not None:  # this step will not be made
            self._forget_batches()

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Leave out the gradient of a sample that does not count. This is the tensor's hook."""
        return torch.zeros_like(gradient) if self._share_now().count == 0 else None

    def _forget_batches(self) -> None:
        """Let no batch count for the next step. The present one counts again with its next backward pass."""
        self._samples = self._counted = 0

    def _count_batch(self) -> None:
        """Begin a step, if none has begun. Count the samples of a batch once, however many backward passes it has."""
        if not self._is_open:
            # What the ranks have in common is from before the forward pass, which has changed running means.
            with self._own_buffers.as_before():
                self._meetings.begin_step()
            self._is_open = True
        if self._counted != self.data.turn:
            share = self._share_now()
            self._counted = self.data.turn
            self._samples += share.count
            self._own_buffers.passed(share)

    def _check_closed(self) -> None:
        if self._update is not None:
            raise GradientError(
                f"{self._world.name()}: a step of the optimizer has not ended. Either an error has ended it in the "
                "middle, and parameters differ between ranks: start again from a checkpoint. Or backward() came inside "
                "optimizer.step(closure): call backward() before, and step() without a closure"
            )
