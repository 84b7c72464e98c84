"""What a strategy is."""

from __future__ import annotations

from typing import Any, Protocol

from mpitrain.adapters.adapter import Adapter
from mpitrain.arrays import Array
from mpitrain.exchange.means import Means
from mpitrain.world import World


class Strategy(Protocol):
    """Decides what the ranks exchange. All ranks make the same calls in the same order."""

    def begin(self, world: World, adapter: Adapter) -> None:
        """Make all replicas equal, and get ready for steps. Collective."""
        ...

    def begin_step(self, weight: float) -> None:
        """Begin a step in which this rank has `weight` samples."""
        ...

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """One gradient of this rank is final; it may be overwritten when this returns. None: see OnGradient."""
        ...

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """End the step: all ranks' mean loss and samples, and the learning rate that was used.

        A step that the adapter's loss scale made infinite is skipped: the means say so, and the rate is 0.

        Raises GradientError, on every rank and with the parameters unchanged, where a gradient cannot be used.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What belongs to a checkpoint and is the same on every rank."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        ...

    def own_state(self) -> dict[str, Any]:
        """What this rank keeps for itself and a checkpoint keeps beside it; see GradientReducer.state.

        {} on every rank where there is nothing. With an entry `place`: text that is equal where it fits bit for bit.
        """
        ...

    def restore_own(self, state: dict[str, Any]) -> None:
        """The reverse of `own_state`; see GradientReducer.restore."""
        ...

    def close(self) -> None:
        """Give back what `begin` has made: communicators, threads, memory. Collective; no step is open, none follows.

        Parameters, and `state` and `own_state` as they were returned before, stay.
        """
        ...
