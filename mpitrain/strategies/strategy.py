"""What a strategy is: the base class, with the defaults of one whose replicas are equal after every step."""

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

# The names of what ranks add to an outer step begin with this text.
ROUND = "round/"


class Strategy:
    """Decides what the ranks exchange. All ranks make the same calls in the same order.

    A strategy has `begin`, `begin_step`, `on_gradient`, `finish_step`, and what it needs of the rest.
    """

    @property
    def replicas_are_equal(self) -> bool:
        """Whether all ranks have the same parameters between the last step and the next one."""
        return True

    @property
    def trains_alone(self) -> bool:
        """Whether this rank's next step uses its own gradients, and not the mean."""
        return False

    @property
    def divides_model(self) -> bool:
        """Whether ranks have different layers. Known since `begin`."""
        return False

    @property
    def unplanned(self) -> str:
        """What `mpitrain plan` calls this strategy when it refuses it; "" if each step of one rank is a whole step of
        the training, which it can measure."""
        return type(self).__name__

    @property
    def num_outer_steps(self) -> int | None:
        """The number of outer steps since `begin`; None for a strategy without outer steps."""
        return None

    def doubt(self, steps: int) -> str:
        """Return a warning about a training of so many steps with these settings; "": there is none. After `begin`."""
        return ""

    @property
    def keeps_own_state(self) -> bool:
        """Whether `own_state` is that of before a step until the step is committed.

        If not, `state` too may change before the commit, but only while `own_state` is not {}.
        """
        return False

    def begin(self, world: World, adapter: Adapter) -> None:
        """Make all replicas equal, and prepare for steps. Collective."""
        raise NotImplementedError

    def passes(self, adapter: Adapter, data: Any) -> VirtualPasses | None:
        """Return what makes several passes of each step on this rank; None: one pass over all its samples.

        Collective, after `begin`. `data` gives the batches of the steps.
        """
        return None

    def begin_step(self, weight: float) -> None:
        """Begin a step in which this rank has `weight` samples."""
        raise NotImplementedError

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """Take in one final gradient of this rank. The caller may overwrite it afterwards. None: see OnGradient."""
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
        """Return what belongs to a checkpoint and is the same on every rank."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """The reverse of `state`.

        Raises CheckpointError if the state is of another kind of training; nothing has changed then.
        """

    def check(self, state: dict[str, Any]) -> None:
        """Raise the CheckpointError that `restore` would raise, and change nothing.

        By default the state is restored for a moment. A strategy whose `restore` overwrites what `state` does not have
        needs a method of its own.
        """
        before = self.state()
        try:
            self.restore(state)
        finally:
            self.restore(before)

    def own_state(self) -> dict[str, Any]:
        """Return what belongs to this rank alone, for a checkpoint; see GradientReducer.state. Collective.

        Call it before `state`: it may wait for what is under way, which then belongs to `state`.

        {} on every rank if there is nothing. Otherwise the entry `place` is a text: if the texts are equal, the state
        fits bit for bit.
        """
        return {}

    def own_state_for(self, reads: bool) -> dict[str, Any]:
        """Return `own_state`. Collective; only ranks with `reads` ask the adapter for its state afterwards.

        So only these need room for the whole state of an optimizer that the ranks have divided.
        """
        return self.own_state()

    def restore_own(self, state: dict[str, Any]) -> None:
        """The reverse of `own_state`; see GradientReducer.restore."""

    def changes(self) -> list[tuple[int, str]]:
        """Return what has changed in the exchange since the last call, the same on every rank.

        Each is the number of the last step before the change, and a text.
        """
        return []

    def close(self) -> None:
        """Give back the communicators, threads and memory that `begin` has made. Collective, after the last step.

        The parameters stay valid, and so do results of `state` and `own_state`.
        """


class MeanStrategy(Strategy):
    """A strategy whose every step is made of the means of a reducer. A subclass has `begin` and `finish_step`.

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
        """See Strategy. What an outer optimizer has kept is left out.

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
        """On a server: what its workers have done in this run, or in the last one."""
        raise NotImplementedError

    def begin_serving(self, data: Any) -> None:
        """Let workers come. A server calls this when its run begins, with the data where the run begins."""
        raise NotImplementedError

    def next_update(self, data: Any) -> tuple[Means, float]:
        """Make the next update from the gradients of workers, and move the data on. Result as of finish_step."""
        raise NotImplementedError

    def fetch(self) -> None:
        """Bring what other servers have of the parameters and the optimizer into the adapter of this server.

        What is changed there afterwards reaches the other servers before the next update.
        """
        raise NotImplementedError

    def end_serving(self, error: BaseException | None) -> None:
        """Send the workers home. A server calls this when its run ends; `error` has ended it, or None."""
        raise NotImplementedError

    def work(self, data: Any) -> None:
        """Compute gradients of the server's work units until its run is over; or, in a shard, serve its part.

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
    """Check the strategy of a script that is planned. Without `mpitrain plan`, any will do.

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
        CheckpointError: it is one.
    """
    if "round" in state:
        raise CheckpointError(
            f"the checkpoint was made after {state['round']['steps']} steps of a round of LocalSGD, DiLoCo, SparseLoCo "
            "or StreamingDiLoCo, where each rank has parameters of its own; continue with that strategy, or from a "
            "checkpoint of a multiple of sync_every by LocalSGD, DiLoCo or SparseLoCo"
        )


def without_rounds(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a rank without what a codec has not sent of an outer step: only another one could use it."""
    return {
        key: {name: part[name] for name in part if not name.startswith(ROUND)} if isinstance(part, Mapping) else part
        for key, part in own.items()
    }
