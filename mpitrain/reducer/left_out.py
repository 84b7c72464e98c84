"""The error-feedback residuals of this rank, saved in checkpoints and restored from them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from mpitrain.reducer.bucket import Bucket, Layout
from mpitrain.reducer.exchange import Exchange
from mpitrain.reducer.slot import Slot
from mpitrain.world.world import World


class LeftOut:
    """The residuals of a reducer's slots; GradientReducer.state and restore describe the content of a state."""

    def __init__(
        self,
        world: World,
        layout: Layout,
        buckets: Sequence[Bucket],
        exchange: Exchange,
        slots: Mapping[numpy.dtype, Slot],
    ) -> None:
        """`slots` of `exchange` hold the buckets, by dtype."""
        self._world = world
        self._layout = layout
        self._buckets = buckets
        self._exchange = exchange
        self._slots = slots

    def state(self, carried: dict[numpy.dtype, numpy.ndarray], *, is_owed: bool) -> dict[str, Any]:
        """Return the residuals, and `carried`, the values that have not been sent yet.

        It is {} if there is no residual and nothing restored is unsent (`is_owed`); see GradientReducer.state.
        """
        on_several_nodes = self._world.num_nodes > 1
        flats = {
            dtype: residual
            for dtype, slot in self._slots.items()
            if on_several_nodes and (residual := slot.left_out()) is not None
        }
        if not flats and not is_owed:
            return {}
        parts = {"residual": flats, "carried": carried}
        return {"place": self._placement()} | {key: self._layout.named(part) for key, part in parts.items() if part}

    def restore(self, state: Mapping[str, Any]) -> dict[numpy.dtype, numpy.ndarray]:
        """Overwrite the residuals. Return what is carried.

        Without a codec in this run, the residuals are also carried, with a message.

        Raises:
            CheckpointError: the state belongs to other parameters. Nothing has changed.
        """
        residual, carried = (self._layout.flats_of(state.get(key, {})) for key in ("residual", "carried"))
        is_sent_whole = False
        for dtype, slot in self._slots.items():
            slot.clear()
            if slot.residual is not None and residual:
                slot.restore(residual[dtype])
            elif residual:
                carried[dtype] = carried[dtype] + residual[dtype] if carried else residual[dtype]
                is_sent_whole = True
        if is_sent_whole:
            self._world.print(
                "mpitrain: the checkpoint holds what a codec has not sent of gradients, and this run has no codec: the "
                "next step sends it whole"
            )
        return carried

    def factors(self) -> dict[str, numpy.ndarray]:
        """Return a copy of the slots' factors by parameter name."""
        return {
            str(name): factor.copy() for slot in self._slots.values() for name, factor in (slot.factors or {}).items()
        }

    def restore_factors(self, factors: Mapping[str, numpy.ndarray]) -> None:
        """Overwrite the factors of the slots."""
        for dtype, slot in self._slots.items():
            if slot.factors is not None:
                names = {name for name, _ in self._layout.tensors(dtype)}
                slot.factors.clear()
                slot.factors.update({name: factor.copy() for name, factor in factors.items() if name in names})

    def _placement(self) -> str:
        """A text that is equal if every rank's residual covers the same elements; these follow from nodes and
        buckets."""
        buckets = [(str(bucket.dtype), bucket.begin, bucket.end) for bucket in self._buckets]
        return hashlib.sha256(repr((self._world.node_ranks, buckets, self._exchange.division)).encode()).hexdigest()
