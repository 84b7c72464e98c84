"""local_sgd and diloco: ranks train by themselves for some steps, and then go on from the mean of their parameters.

    step           1   2   3  ...  sync_every     sync_every + 1
    rank 0         ──────────────────┐  outer  ┌──────────────
    rank 1         ──────────────────┴─ step ──┴──────────────

In between, ranks send each other only 80 bytes a step: samples, losses, and whether a gradient cannot be used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array, is_device_array
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.exchange.alone import AloneExchange
from mpitrain.exchange.exchange import Exchange, make_exchange
from mpitrain.exchange.means import Means
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.strategies.outer import OuterParameters
from mpitrain.strategies.sync import Sync
from mpitrain.training.optimizers import Optimizer, Sgd
from mpitrain.world import World

# A rank's gradients go nowhere, so there is no reason to cut them into buckets.
_ONE_BUCKET = 2**62


class LocalSGD:
    """Each rank makes `sync_every` steps of its own optimizer, on its own samples; then they meet in an *outer step*.

    There all ranks go on from the mean of their parameters, weighted by the samples that each has seen in this round.
    With sync_every=1 and plain SGD, it is Sync, to rounding. On one rank it is plain training, bit for bit. The state
    of the optimizer, such as momentum, stays with its rank. A rank without samples in a step makes this step with
    gradients of zeros, so that the schedules of all ranks stay together.

    Between outer steps the parameters differ from rank to rank. Compare, evaluate and export at multiples of
    `sync_every`. A run ends with an outer step.

    Source: Stich, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767 (2018), algorithm 1; weights by
    samples as in McMahan et al., arXiv 1602.05629 (2016).
    """

    def __init__(
        self, sync_every: int = 10, *, warm_up: int = 0, exchange: Callable[[World], Exchange] = make_exchange
    ) -> None:
        """Give the same values on all ranks.

        Args:
            sync_every: steps of a round, at least 1.
            warm_up: the first steps of the training are made as with Sync, so many.
            exchange: makes the object that computes means over ranks, for a World.

        Raises:
            ConfigError: a value is not allowed.
        """
        self._start(sync_every, warm_up, exchange, None)

    def _start(
        self, sync_every: int, warm_up: int, exchange: Callable[[World], Exchange], outer: Optimizer | None
    ) -> None:
        for name, value, least in (("sync_every", sync_every, 1), ("warm_up", warm_up, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{type(self).__name__}: {name}={value!r}; it must be an int of at least {least}")
        self._sync_every, self._warm_up, self._exchange, self._outer = sync_every, warm_up, exchange, outer

    @property
    def replicas_are_equal(self) -> bool:
        """See Strategy: True if the next step begins a round."""
        return self._steps == 0

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters.

        Raises:
            MismatchError: the ranks differ in the numbers of steps or in the model. Raised on every rank.
        """
        self._world, self._adapter, self._scale = world, adapter, adapter.loss_scale
        world.agree("begin", [f"{type(self).__name__}(sync_every={self._sync_every}, warm_up={self._warm_up})"])
        self._sync = Sync(self._exchange) if self._warm_up else None
        if self._sync:
            self._sync.begin(world, adapter)
        elif world.size > 1:
            adapter.load_parameters(world.sync(adapter.parameters()))
        self._alone = AloneExchange(world)
        on_device = any(is_device_array(value) for value in adapter.parameters().values())
        self._inner = GradientReducer(
            world,
            adapter.layout,
            exchange=lambda _: self._alone,
            bucket_bytes=_ONE_BUCKET,
            threaded=False,
            on_device=on_device,
        )
        self._parameters = OuterParameters(world, adapter, self._outer, self._exchange)
        self._left_to_warm_up = self._warm_up
        self._steps, self._samples, self._all_samples = 0, 0.0, 0.0

    def begin_step(self, weight: float) -> None:
        """See Strategy."""
        if self._is_warming_up:
            assert self._sync
            self._sync.begin_step(weight)
            return
        if self._steps == 0 and not self._is_plain:
            self._parameters.note()
        self._weight = weight
        self._alone.loss_scale = self._scale.value if self._scale else 1.0
        self._inner.begin(weight, self._alone.loss_scale)

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """See Strategy."""
        if self._is_warming_up:
            assert self._sync
            self._sync.on_gradient(index, gradient)
        else:
            self._inner.ready(index, gradient)

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy. The loss is the mean over all ranks, each with the parameters that it has."""
        if self._is_warming_up:
            assert self._sync
            made = self._sync.finish_step(adapter, loss)
            self._left_to_warm_up -= 1
            return made
        may_skip = self._scale is not None and self._scale.may_skip
        means = self._inner.finish(loss, may_skip=may_skip, note=adapter.note())
        all_samples = self._all_samples + (means.weight if means.is_finite else 0.0)
        samples = self._samples + (self._weight if means.is_finite else 0.0)
        if self._steps + 1 < self._sync_every or self._is_plain:
            self._world.commit()
            rate = self._apply(means)
            self._steps += not self._is_plain
        else:
            rate = self._apply_and_meet(means, samples, all_samples)
            self._steps, samples, all_samples = 0, 0.0, 0.0
        self._samples, self._all_samples = samples, all_samples
        if self._scale:
            self._scale.update(skipped=not means.is_finite)
        return means, rate

    def end_run(self) -> None:
        """See Strategy. The round ends here."""
        if self._steps:
            self._parameters.exchange(self._samples, self._all_samples)
            self._world.commit()
            self._parameters.update()
            self._steps, self._samples, self._all_samples = 0, 0.0, 0.0

    @property
    def _is_plain(self) -> bool:
        """One rank trains, and begins no round, since its end would change nothing."""
        return self._world.size == 1 and self._outer is None and self._steps == 0

    @property
    def _is_warming_up(self) -> bool:
        return self._left_to_warm_up > 0

    def _apply(self, means: Means) -> float:
        return self._adapter.apply_gradients(self._inner.flats, means.remarks) if means.is_finite else 0.0

    def _apply_and_meet(self, means: Means, samples: float, all_samples: float) -> float:
        """Make the last step of a round and the outer step, with one commit for both. Return the learning rate."""
        # Only a rank that may have to make this step again needs to go back to where it stood.
        before = deepcopy(self._adapter.state()) if self._world.committer is not None else None
        try:
            rate = self._apply(means)
            self._parameters.exchange(samples, all_samples)
            self._world.commit()
        except Exception:
            if before is not None:
                self._adapter.restore(before)
            raise
        self._parameters.update()
        return rate

    def state(self) -> dict[str, Any]:
        """See Strategy: `outer` if an outer optimizer keeps something, `round` in the middle of one, `warm_up`."""
        state: dict[str, Any] = {}
        if self._is_warming_up:
            state["warm_up"] = self._left_to_warm_up
        if self._outer:
            state["outer"] = self._parameters.state()
        if self._steps:
            state["round"] = {
                "steps": self._steps,
                "samples": self._all_samples,
                "parameters": self._parameters.origin(),
            }
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy. A state of Sync, {}, begins a round, without a warm-up.

        Raises:
            CheckpointError: the state belongs to other parameters, or to a longer round.
        """
        begun = state.get("round", {})
        if not 0 <= begun.get("steps", 0) < self._sync_every:
            raise CheckpointError(
                f"the checkpoint was made after {begun['steps']} steps of a round, and sync_every={self._sync_every} "
                f"makes shorter ones; go on with sync_every above {begun['steps']}"
            )
        self._left_to_warm_up = state.get("warm_up", 0) if self._sync else 0
        self._parameters.restore(state.get("outer", {}), begun.get("parameters", {}))
        self._steps, self._all_samples = begun.get("steps", 0), begun.get("samples", 0.0)
        self._samples = self._all_samples if self._world.size == 1 else 0.0

    def own_state(self) -> dict[str, Any]:
        """See Strategy: parameters and optimizer of this rank, and what they add to the outer step: `residual`."""
        if self._is_warming_up:
            assert self._sync
            return self._sync.own_state()
        if self._world.size == 1:
            return {}
        added = self._parameters.own_state(self._samples if self._steps else 0.0)
        return {"place": self._place(), "local": self._adapter.state(), "samples": self._samples, **added}

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy. With other ranks than before, all begin with the parameters of the last outer step.

        What the ranks before had learned since then goes into the next outer step.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        if self._is_warming_up:
            assert self._sync
            self._sync.restore_own(state)
            return
        is_same_rank = "local" in state
        if is_same_rank:
            self._adapter.restore(state["local"])
            self._samples = float(state["samples"])
        elif self._steps and (state or self._world.size > 1):  # else one rank goes on from its own parameters
            self._parameters.go_back()
            self._samples = 0.0
        self._parameters.restore_own({key: state[key] for key in ("residual", "carried") if key in state})

    def close(self) -> None:
        """See Strategy."""
        self._inner.close()
        self._parameters.close()
        if self._sync:
            self._sync.close()

    def _place(self) -> str:
        """A text that is equal if each rank can go on with its own state."""
        parts = [type(self).__name__, self._world.node_ranks, self._parameters.place()]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class DiLoCo(LocalSGD):
    """As LocalSGD, with an *outer optimizer*, which moves the common parameters in an outer step.

    Its gradient is the mean, over ranks, of the parameters at the beginning of the round minus those at its end.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105
    (2023), algorithm 1. The defaults are the paper's: 500 steps, and Nesterov momentum of 0.9 with a rate of 0.7.
    """

    def __init__(
        self,
        sync_every: int = 500,
        *,
        outer: Optimizer | None = None,
        warm_up: int = 0,
        exchange: Callable[[World], Exchange] = make_exchange,
    ) -> None:
        """See LocalSGD.

        Args:
            sync_every, warm_up, exchange: see LocalSGD.
            outer: the outer optimizer; default: `Sgd(0.7, momentum=0.9, nesterov=True)`. `Sgd(1.0)` gives LocalSGD. Its
                weight decay, if any, applies to nothing.

        Raises:
            ConfigError: a value is not allowed.
        """
        outer = Sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
        self._start(sync_every, warm_up, exchange, outer)
