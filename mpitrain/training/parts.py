"""The parts of a Trainer in one World, and the transfer of their state to the parts for the next World."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mpitrain.adapters.adapter import Adapter
from mpitrain.cuda.failures import memory_explained
from mpitrain.errors import ConfigError
from mpitrain.reading import shown
from mpitrain.state.resume import add_up
from mpitrain.strategies import Strategy
from mpitrain.strategies.strategy import check_planned
from mpitrain.tree import Tree
from mpitrain.world.world import World


class Data(Protocol):
    """An endless source of batches, such as ArrayData."""

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    def __next__(self) -> tuple[Tree, int]:
        """Return this rank's part of the next global batch, and its number of samples."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Parts:
    """The result of `build(world)`: everything that may hold a communicator, so that all of it can be made again.

    Attributes:
        adapter: the model with its optimizer, such as ArrayFunction or TorchModule.
        strategy: decides what the ranks exchange, such as Sync.
        data: this rank's batches, such as ArrayData.
    """

    adapter: Adapter
    strategy: Strategy
    data: Data


class Built:
    """Makes the parts of a Trainer again for every World.

    Attributes:
        parts: the newest parts; None before the first `begin`.
    """

    def __init__(self, build: Callable[[World], Parts]) -> None:
        self.parts: Parts | None = None
        self._build = build
        self._is_whole = False

    def begin(self, world: World) -> Parts:
        """Make parts for a World, and call `begin` of the strategy. Collective."""
        self._is_whole = False
        with memory_explained():
            self.parts = parts = self._build(world)
            if not isinstance(parts, Parts):
                raise ConfigError(
                    f"{world.name()}: the function that mt.Trainer was given has returned {shown(parts)}; it must "
                    "return mt.Parts(adapter, strategy, data)"
                )
            check_planned(world, parts.strategy)
            parts.strategy.begin(world, parts.adapter)
        self._is_whole = True
        return parts

    def state(self) -> dict[str, Any]:
        """Return the state from which the next parts continue, the same on every rank. Not collective."""
        parts = self.parts
        assert parts is not None
        return {"data": parts.data.state(), "adapter": parts.adapter.state(), "strategy": parts.strategy.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`.

        Raises:
            CheckpointError: `build` has made a different model or data set than before.
        """
        parts = self.parts
        assert parts is not None
        parts.data.restore(state["data"])
        parts.strategy.restore(state["strategy"])
        parts.adapter.restore(state["adapter"])

    def restore_own(self, world: World, own: dict[str, Any]) -> None:
        """Continue from this rank's result of the strategy's `own_state`, in this World or another one. Collective.

        If the placement of the ranks is unchanged, each rank keeps its state. Otherwise it goes into the means of the
        next step.
        """
        assert self.parts is not None
        strategy = self.parts.strategy
        is_placed_alike = own.get("place") == strategy.own_state_for(reads=False).get("place")
        if not all(world.allgather(is_placed_alike)):
            total: dict[str, Any] = {}
            add_up(total, own)
            own = total
        strategy.restore_own(own)

    def close(self) -> None:
        """Free communicators, threads and memory. Collective, except in a broken World."""
        if self.parts is None or not self._is_whole:  # incomplete: a rank was lost while the parts were made
            return
        self.parts.strategy.close()
        if hasattr(self.parts.data, "close"):  # Prefetch has a thread
            self.parts.data.close()
