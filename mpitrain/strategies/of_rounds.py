"""What a strategy without rounds makes of a checkpoint of one with rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.errors import CheckpointError

# The names of what ranks add to an outer step begin with this text.
ROUND = "round/"


def refuse_round(state: Mapping[str, Any]) -> None:
    """Refuse a state from the middle of a round.

    Raises:
        CheckpointError: it is one.
    """
    if "round" in state:
        raise CheckpointError(
            f"the checkpoint was made after {state['round']['steps']} steps of a round of LocalSGD, DiLoCo, SparseLoCo "
            "or StreamingDiLoCo, where each rank has parameters of its own; go on with that strategy, or from a "
            "checkpoint of a multiple of sync_every by LocalSGD, DiLoCo or SparseLoCo"
        )


def without_rounds(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a rank without what a codec has left out of an outer step: only another one could use it."""
    return {
        key: {name: part[name] for name in part if not name.startswith(ROUND)} if isinstance(part, Mapping) else part
        for key, part in own.items()
    }
