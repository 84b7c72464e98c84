"""The base class of strategies, with the defaults for one whose replicas are equal after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array
from mpitrain.errors import CheckpointError, ConfigError, everywhere
from mpitrain.optim.loss_scale import LossScale
from mpitrain.reducer.means import Means
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.reducer.reducer import GradientReducer
    from mpitrain.server.status import ServerStats  # only a strategy with servers loads them
    from mpitrain.strategies.choosing_reducer import ChoosingReducer
    from mpitrain.strategies.virtual_ranks import VirtualPasses

# The names of values that ranks add to an outer step begin with this text.
ROUND = "round/"


class Strategy:
    """Decides what the ranks exchange. All ranks make the same calls in the same order.

    A strategy has `begin`, `begin_step`, `on_gradient`, `finish_step`, and those of the other methods that it needs.
    """

    @property
    def replicas_are_equal(self) -> bool:
        """Whether all ranks have the same parameters between the last step and the next one."""
        return True

    @property
    def trains_alone(self) -> bool:
        """Whether this rank's next step uses its own gradients instead of the mean."""
        return False

    @property
    def divides_model(self) -> bool:
        """Whether ranks have different layers. Known since `begin`."""
        return False

    @property
    def unplanned(self) -> str:
        """The name that `mpitrain plan` prints when it refuses this strategy; "" if it can measure it, because each
        step of one rank is a whole step of the training."""
        return type(self).__name__

    @property
    def num_outer_steps(self) -> int | None:
        """The number of outer steps since `begin`; None for a strategy without outer steps."""
        return None

    def doubt(self, steps: int) -> str:
        """Return a warning about a training of `steps` steps with these settings; "": there is none. Call it after
        `begin`."""
        return ""

    @property
    def keeps_own_state(self) -> bool:
        """Whether `own_state` remains the state from before a step until the step is committed.

        If not, `state` may also change before the commit, but only while `own_state` is not {}.
        """
        return False

    def begin(self, world: World, adapter: Adapter) -> None:
        """Make all replicas equal, and prepare for steps. Collective."""
        raise NotImplementedError

    def passes(self, adapter: Adapter, data: Any) -> VirtualPasses | None:
        """Return the object that runs several passes for each step on this rank; None: one pass over all samples.

        Collective, after `begin`. `data` yields the batches of the steps.
        """
        return None

    def begin_step(self, weight: float) -> None:
        """Begin a step in which this rank has `weight` samples."""
        raise NotImplementedError

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """Accept one final gradient of this rank. The caller may overwrite it afterwards. None: see OnGradient."""
        raise NotImplementedError

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """End the step. Return the mean loss and the samples of all ranks, and the learning rate that was used.

        Call `world.commit()` after the exchange, before anything changes. A step that the adapter's loss scale made
        infinite is skipped. Then `means.is_finite` is False, and the rate is 0.

        Raises GradientError if a gradient cannot be used: on every rank, with the parameters unchanged.
        """
        raise NotImplementedError

    def end_run(self) -> None:
        """Make the replicas equal, if they are not. Collective, after the last step of a run. Steps may follow."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint that is the same on every rank."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """The reverse of `state`.

        Raises CheckpointError if the state is of another kind of training. Nothing has changed then.
        """

    def check(self, state: dict[str, Any]) -> None:
        """Raise the CheckpointError that `restore` would raise, and change nothing.

        By default the state is restored for a moment. A strategy whose `restore` overwrites values that are not in
        `state` needs its own method.
        """
        before = self.state()
        try:
            self.restore(state)
        finally:
            self.restore(before)

    def own_state(self) -> dict[str, Any]:
        """Return the state that belongs to this rank alone, for a checkpoint; see GradientReducer.state. Collective.

        Call it before `state`: it may wait for an exchange under way, whose result then belongs to `state`.

        It is {} on every rank if there is no such state. Otherwise the entry `place` is a text: if the texts are equal,
        the state fits bit for bit.
        """
        return {}

    def own_state_for(self, reads: bool) -> dict[str, Any]:
        """Return `own_state`. Collective; only ranks with `reads` ask the adapter for its state afterwards.

        So only these need room for the whole state of a sharded optimizer.
        """
        return self.own_state()

    def restore_own(self, state: dict[str, Any]) -> None:
        """The reverse of `own_state`; see GradientReducer.restore."""

    def changes(self) -> list[tuple[int, str]]:
        """Return the changes of the exchange since the last call, the same on every rank.

        Each change is the number of the last step before it, and a text.
        """
        return []

    def close(self) -> None:
        """Free the communicators, threads and memory that `begin` has made. Collective, after the last step.

        The parameters stay valid, and so do results of `state` and `own_state`.
        """


class MeanStrategy(Strategy):
    """A strategy that computes every step from the means of a reducer. A subclass has `begin` and `finish_step`.

    `begin` sets the attributes that begin with an underscore:
        _world: the ranks that train together.
        _reducer: makes the means.
        _scale: the loss scale of the adapter; None: there is none.
    """

    _world: World
    _reducer: GradientReducer | ChoosingReducer
    _scale: LossScale | None

    @property
    def _may_skip(self) -> bool:
        return self._scale is not None and self._scale.may_skip

    def begin_step(self, weight: float | Sequence[float]) -> None:
        """See Strategy."""
        self._reducer.begin(weight, self._scale.value if self._scale else 1.0)

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """See Strategy."""
        self._reducer.ready(index, gradient)

    def state(self) -> dict[str, Any]:
        """See Strategy: `factors`, if compression continues from them."""
        factors = self._reducer.factors()
        return {"factors": factors} if factors else {}

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy. The state of an outer optimizer is ignored.

        Raises:
            CheckpointError: the state is from the middle of a round of LocalSGD or DiLoCo.
        """
        refuse_round(state)
        self._reducer.restore_factors(state.get("factors", {}))

    def own_state(self) -> dict[str, Any]:
        """See Strategy. The state is the error-feedback residual."""
        return self._reducer.state()

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy."""
        self._reducer.restore(without_rounds(state))

    def close(self) -> None:
        """See Strategy."""
        self._reducer.close()


class ServedStrategy(Strategy):
    """A Strategy that can also train with servers and workers; see mpitrain.role. Each of them has its own World.

    Without servers it is a Strategy for one rank.
    """

    @property
    def role(self) -> str:
        """Since `begin`: "server", "shard" or "worker"; see Role. "": this process trains by itself, by the calls of
        Strategy."""
        raise NotImplementedError

    @property
    def stats(self) -> ServerStats:
        """On a server: statistics of its workers in this run, or in the last one."""
        raise NotImplementedError

    def begin_serving(self, data: Any) -> None:
        """Let workers connect. A server calls this when its run begins, with the data at its initial position."""
        raise NotImplementedError

    def next_update(self, data: Any) -> tuple[Means, float]:
        """Make the next update from the gradients of workers, and advance the data. The result is as for
        finish_step."""
        raise NotImplementedError

    def fetch(self) -> None:
        """Copy the other servers' parts of the parameters and the optimizer into the adapter of this server.

        Later changes there reach the other servers before the next update.
        """
        raise NotImplementedError

    def end_serving(self, error: BaseException | None) -> None:
        """Dismiss the workers. A server calls this when its run ends, with the error that ended it, or None."""
        raise NotImplementedError

    def work(self, data: Any) -> None:
        """Compute gradients for the server's work units until its run is over; a shard serves its part instead.

        Workers and shards call this in place of a run.
        """
        raise NotImplementedError


def refuse_stages(strategy: Strategy, reason: str) -> None:
    """Refuse a strategy whose ranks have different layers. Call this on every rank.

    Raises:
        ConfigError: `divides_model` is True. The text is `reason`. Raised on every rank.
    """
    if strategy.divides_model:
        raise everywhere(ConfigError(reason))


def check_planned(world: World, strategy: Strategy) -> None:
    """Check the strategy of a script under `mpitrain plan`. Otherwise any strategy is allowed.

    A plan is measured on one rank, where each step must be a whole step of the training.

    Raises:
        ConfigError: it is not mt.Sync, or has virtual ranks.
    """
    if world.watch is not None and strategy.unplanned:
        raise ConfigError(
            f"{world.name()}: mpitrain plan found the strategy {strategy.unplanned}; allowed is mt.Sync without "
            "virtual ranks, because a plan is made of its steps. Plan the script with mt.Sync(). The plan also has "
            "rows for mt.LocalSGD and mt.ParameterServer"
        )


def share_parameters(world: World, adapter: Adapter) -> None:
    """Give every rank the parameters of rank 0. Collective."""
    if world.size > 1:
        adapter.load_parameters(world.broadcast(adapter.parameters()))


def applied(adapter: Adapter, flats: Mapping[numpy.dtype, Array], means: Means, scale: LossScale | None) -> float:
    """Update the parameters, and adapt the loss scale. Return the learning rate; 0.0: the step is skipped."""
    rate = adapter.apply_gradients(flats, means.remarks) if means.is_finite else 0.0
    if scale:
        scale.update(skipped=not means.is_finite)
    return rate


def refuse_round(state: Mapping[str, Any]) -> None:
    """Refuse a state from the middle of a round.

    Raises:
        CheckpointError: it is such a state.
    """
    if "round" in state:
        raise CheckpointError(
            f"the checkpoint was made after {state['round']['steps']} steps of a round of LocalSGD, DiLoCo, SparseLoCo "
            "or StreamingDiLoCo, where each rank has its own parameters; continue with that strategy, or from a "
            "checkpoint of a multiple of sync_every by LocalSGD, DiLoCo or SparseLoCo"
        )


def without_rounds(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a rank without the residual of an outer step, which only another outer step could use."""
    return {
        key: {name: part[name] for name in part if not name.startswith(ROUND)} if isinstance(part, Mapping) else part
        for key, part in own.items()
    }
