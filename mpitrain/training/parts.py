"""The parts of a Trainer in one World."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mpitrain.adapters.adapter import Adapter
from mpitrain.strategies import Strategy
from mpitrain.tree import Tree


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
        strategy: what the ranks exchange, such as Sync.
        data: this rank's batches, such as ArrayData.
    """

    adapter: Adapter
    strategy: Strategy
    data: Data
