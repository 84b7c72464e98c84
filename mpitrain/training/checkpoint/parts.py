"""Parts of single ranks: what a rank's codec has left out of the gradients and not sent yet.

A checkpoint does not depend on ranks, but this rest must be kept. So each rank writes a part of its own beside the
checkpoint, `step-00000100.part-2-of-4`. The training needs only the sum of all parts, which is missing from the means
so far. If the ranks are placed as when the parts were written, each gets its own part back, bit for bit.
With another number of ranks, or another placement, the readers add the parts up and put the sum into the next step's
mean.

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
    """Return the name of a rank's part of the checkpoint of a step."""
    return f"{name_of(step)}.part-{rank}-of-{size}"


def prune_parts(directory: Path, keep: int, last: int) -> None:
    """Remove all ranks' parts, except those of the `keep` newest steps up to the step `last`. Any rank may call this.

    Raises:
        OSError: a part cannot be removed.
    """
    parts = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    # Parts of higher steps belong to faster ranks, or to an earlier run that went further than this one so far.
    steps = sorted({step for step, _ in parts if step <= last}, reverse=True)
    for step, path in parts:
        if step in steps[keep:]:
            remove(path)


def read_part(directory: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """Read the part that `rank` wrote for the checkpoint with this manifest.

    Raises:
        CheckpointError: the part is missing, damaged, or of another training.
    """
    path = directory / part_name(manifest.step, rank, manifest.parts)
    its_manifest, state = read(path)
    if its_manifest.run != manifest.run:
        raise CheckpointError(f"{path} belongs to another training than the checkpoint of that step")
    return state


def add_up(total: dict[str, dict[str, numpy.ndarray]], part: Mapping[str, Any]) -> None:
    """Add the contents of a part, whatever their name, to `total["carried"]`."""
    carried = total.setdefault("carried", {})
    for key in ("residual", "carried"):
        for name, value in part.get(key, {}).items():
            carried[name] = carried[name] + value if name in carried else value
