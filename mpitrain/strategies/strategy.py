"""The protocol of a strategy."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array
from mpitrain.errors import ConfigError, everywhere
from mpitrain.exchange.means import Means
from mpitrain.serve.ledger import ServerLedger
from mpitrain.world import World


class Strategy(Protocol):
    """Decides what the ranks exchange. All ranks make the same calls in the same order.

    A strategy whose replicas differ between some steps has the property `replicas_are_equal`, which is then False. One
    whose `own_state` is that of before a step until the step is committed has the attribute `keeps_own_state`, True.
    Of any other, `state` too may change before the commit, but only while `own_state` is not {}.
    One whose `restore` overwrites what belongs to a rank alone has the method `check(state)`: it raises the
    CheckpointError that `restore` would raise, and changes nothing. One whose ranks use their own gradients in the next
    step, and not the mean, has the property `trains_alone`, which is then True. One with outer steps has their number
    since `begin`: `num_outer_steps`.
    One whose ranks have different layers has the property `divides_model`, which is then True.
    One that divides the optimizer has the method `own_state_for`; see the function of that name.
    One that changes the exchange while it trains has the method `changes()`: it returns what has changed since the last
    call, as pairs of the number of the last step before and a text, the same on every rank.
    """

    def begin(self, world: World, adapter: Adapter) -> None:
        """Make all replicas equal, and prepare for steps. Collective."""
        ...

    def begin_step(self, weight: float) -> None:
        """Begin a step in which this rank has `weight` samples."""
        ...

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """Take in one final gradient of this rank. The caller may overwrite it afterwards. None: see OnGradient."""
        ...

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """End the step. Return the mean loss and the samples of all ranks, and the learning rate that was used.

        Call `world.commit()` after the exchange, before anything changes. A step that the adapter's loss scale made
        infinite is skipped. Then the means say so, and the rate is 0.

        Raises GradientError if a gradient cannot be used: on every rank, with the parameters unchanged.
        """
        ...

    def end_run(self) -> None:
        """Make the replicas equal, if they are not. Collective, after the last step of a run. Steps may follow."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what belongs to a checkpoint and is the same on every rank."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        ...

    def own_state(self) -> dict[str, Any]:
        """Return what belongs to this rank alone, for a checkpoint; see GradientReducer.state. Collective.

        Call it before `state`: it may wait for what is under way, which then belongs to `state`.

        {} on every rank if there is nothing. Otherwise the entry `place` is a text: if the texts are equal, the state
        fits bit for bit.
        """
        ...

    def restore_own(self, state: dict[str, Any]) -> None:
        """The reverse of `own_state`; see GradientReducer.restore."""
        ...

    def close(self) -> None:
        """Give back the communicators, threads and memory that `begin` has made. Collective, after the last step.

        The parameters stay valid, and so do results of `state` and `own_state`.
        """
        ...


def own_state_for(strategy: Strategy, *, reads: bool) -> dict[str, Any]:
    """Return `strategy.own_state()`. Collective; only ranks with `reads` ask the adapter for its state afterwards.

    So only these need room for the whole state of an optimizer that the ranks have divided.
    """
    divided: Any = strategy
    own: dict[str, Any] = divided.own_state_for(reads) if hasattr(divided, "own_state_for") else strategy.own_state()
    return own


@runtime_checkable
class ServedStrategy(Strategy, Protocol):
    """A Strategy that can also train with servers and workers; see mpitrain.job.role. Each of them has its own World.

    Without servers it is a Strategy for one rank.
    """

    @property
    def role(self) -> str:
        """Since `begin`: "server", "shard" or "worker"; see Role. "": this process trains by itself, by the calls of
        Strategy."""
        ...

    @property
    def ledger(self) -> ServerLedger:
        """On a server: what its workers have done in this run, or in the last one."""
        ...

    def begin_serving(self, data: Any) -> None:
        """Let workers come. A server calls this when its run begins, with the data where the run begins."""
        ...

    def next_update(self, data: Any) -> tuple[Means, float]:
        """Make the next update from the gradients of workers, and move the data on. Result as of finish_step."""
        ...

    def fetch(self) -> None:
        """Bring what other servers have of the parameters and the optimizer into the adapter of this server.

        What is changed there afterwards reaches the other servers before the next update.
        """
        ...

    def end_serving(self, error: BaseException | None) -> None:
        """Send the workers home. A server calls this when its run ends; `error` has ended it, or None."""
        ...

    def work(self, data: Any) -> None:
        """Compute gradients of the server's jobs until its run is over; or, in a shard, serve its part.

        Workers and shards call this in place of a run.
        """
        ...


def refuse_stages(strategy: Strategy, reason: str) -> None:
    """Refuse a strategy whose ranks have different layers. Call this on every rank.

    Raises:
        ConfigError: `divides_model` is True. The text is `reason`. Raised on every rank.
    """
    if getattr(strategy, "divides_model", False):
        raise everywhere(ConfigError(reason))
