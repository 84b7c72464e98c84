"""Rounds of steps between which the replicas are equal, in checkpoints that another strategy reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.errors import CheckpointError


def refuse_round(state: Mapping[str, Any]) -> None:
    """Refuse, for another strategy, a state from the middle of a round.

    Raises:
        CheckpointError: it is one.
    """
    if "round" in state:
        raise CheckpointError(
            f"the checkpoint was made after {state['round']['steps']} steps of a round of LocalSGD or DiLoCo, where "
            "each rank has parameters of its own; go on with that strategy, or from a checkpoint of a multiple of "
            "sync_every"
        )
