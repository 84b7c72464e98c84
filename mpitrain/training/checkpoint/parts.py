"""What belongs to a rank: what its codec has left out of the gradients it sent, and has not sent yet.

Nothing in a checkpoint knows a rank, and this still has to be kept. So each rank writes a part of its own beside the
checkpoint, `step-00000100.part-2-of-4`. What counts for the training is the sum of all parts: it is missing from the
means so far. Ranks that are placed as those that wrote the parts get their own back, bit for bit. At any other number
of ranks, or in another placement, the readers add the parts up and put the sum into the next step's mean.

A part that is missing or damaged costs one step's rounding on one rank; a line says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from mpitrain.errors import CheckpointError
from mpitrain.training.checkpoint.manifest import Manifest
from mpitrain.training.checkpoint.store import name_of, read, remove

_NAME = re.compile(r"step-(\d{8,})\.part-(\d+)-of-(\d+)")


def part_name(step: int, rank: int, size: int) -> str:
    """What a rank's part of the checkpoint of a step is called."""
    return f"{name_of(step)}.part-{rank}-of-{size}"


def prune_parts(directory: Path, keep: int, last: int) -> None:
    """Remove all ranks' parts of older steps than the `keep` newest up to the step `last`. Any rank may do it.

    Raises:
        OSError: one cannot be removed.
    """
    parts = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    # Those of higher steps are of faster ranks, or of a run that this one has gone back behind.
    steps = sorted({step for step, _ in parts if step <= last}, reverse=True)
    for step, path in parts:
        if step in steps[keep:]:
            remove(path)


def read_part(directory: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """The part that `rank` wrote for the checkpoint with this manifest.

    Raises:
        CheckpointError: it is not there, damaged, or of another training.
    """
    path = directory / part_name(manifest.step, rank, manifest.parts)
    its_manifest, state = read(path)
    if its_manifest.run != manifest.run:
        raise CheckpointError(f"{path} belongs to another training than the checkpoint of that step")
    return state


def add_up(total: dict[str, dict[str, numpy.ndarray]], part: Mapping[str, Any]) -> None:
    """Add what a part holds, whatever it calls it, to `total["carried"]`."""
    carried = total.setdefault("carried", {})
    for key in ("residual", "carried"):
        for name, value in part.get(key, {}).items():
            carried[name] = carried[name] + value if name in carried else value
