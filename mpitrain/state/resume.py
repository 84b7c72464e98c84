"""The choice of the state to resume from: the newest complete checkpoint in any directory, and the ranks' own parts.

If all nodes see one directory, rank 0 reads it. Otherwise one rank looks into each directory, and the lowest rank with
the newest complete checkpoint reads it. All ranks receive the state, so a node that has lost its disk, or is new, needs
no copy of its own.

A checkpoint does not depend on ranks, but a rank's error-feedback residual, which it has not sent yet, must be
kept too. So each rank writes a part of its own beside the checkpoint, `step-00000100.part-2-of-4`. The training needs
only the sum of all parts, which is missing from the means so far. If the placement of the ranks is unchanged, each gets
its own part back, bit for bit. With another number of ranks, or another placement, the readers add the parts up and put
the sum into the next step's mean.

A part that is missing or damaged costs one step's rounding on one rank; a warning names it.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from mpitrain.errors import CheckpointError, everywhere
from mpitrain.state.manifest import Manifest, read_manifest
from mpitrain.state.store import entries, half_written, make_directory, name_of, read, remove
from mpitrain.world.world import World

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


@dataclass(frozen=True)
class Found:
    """A checkpoint to continue from; the same on every rank.

    Attributes:
        manifest, state: its manifest and state; the arrays are on the host.
        rank: the rank that has read it.
    """

    manifest: Manifest
    state: dict[str, Any]
    rank: int


def is_first_of_node(world: World) -> bool:
    """Return whether this rank is the lowest of its node, which manages the node's copy."""
    return world.node_ranks.index(world.node_rank) == world.rank


def say(world: World, text: str) -> None:
    """Print a line with this rank's name to stderr."""
    print(f"mpitrain: {world.name()}: {text}", file=sys.stderr, flush=True)


def keepers(world: World, directory: Path, copies: int | None) -> dict[int, int]:
    """Return, by node, the node whose first rank manages the directory that the node sees. Collective.

    That is the node itself, or an earlier one that sees the same directory. Missing directories are made.

    Args:
        copies: the most directories to look after. Nodes that see none of these are left out. None: no limit.

    Raises:
        CheckpointError: one of those ranks cannot write there. Raised on every rank.
    """
    keeper_of_node: dict[int, int] = {}
    while len(keeper_of_node) < world.num_nodes and (copies is None or len(set(keeper_of_node.values())) < copies):
        keeper = min(set(world.node_ranks) - keeper_of_node.keys())
        root = world.node_ranks.index(keeper)
        token = directory / f".seen-{uuid.uuid4().hex}"  # a new name, which is in no cache of a network file system
        with world.together("use the checkpoint directory"):
            if world.rank == root:
                _check_writable(directory, token)
        name = world.broadcast_object(token.name, root=root)
        # os.path, because Path.exists() raises for a directory that this user may not enter.
        sees = world.allgather(is_first_of_node(world) and os.path.exists(directory / name))  # noqa: PTH110
        if world.rank == root:
            with suppress(OSError):
                token.unlink()
        seeing = {world.node_ranks[rank] for rank, saw in enumerate(sees) if saw} | {keeper}
        # An earlier node may see this token although this node did not see the earlier node's: its cache was stale.
        first = min((keeper_of_node[node] for node in seeing if node in keeper_of_node), default=keeper)
        keeper_of_node |= dict.fromkeys(seeing - keeper_of_node.keys(), first)
    return keeper_of_node


def _check_writable(directory: Path, token: Path) -> None:
    """Make the directory and the empty file `token` in it. An empty file needs no space on a full disk.

    Raises:
        CheckpointError: one of them cannot be made.
    """
    try:
        make_directory(directory)
        for left in directory.glob(".seen-*"):  # left by a job that was killed in its first moments
            left.unlink(missing_ok=True)
        token.touch()
    except OSError as error:
        raise CheckpointError(
            f"cannot write into the checkpoint directory {directory}: {error.strerror or error}; "
            "name one that this user can write to"
        ) from error


def newest(world: World, directory: Path, *, reads: bool, above: int = 0) -> Found | None:
    """Return the newest complete checkpoint, or None if there never was one. Collective.

    If its step is not greater than `above`, the step of an in-memory checkpoint, its state is not read, and is {}.

    Skip damaged and incomplete checkpoints, and name them on stderr.

    Args:
        reads: this rank looks into its directory. The manifests of all ranks that do so are compared.

    Raises:
        CheckpointError: there are checkpoints, but none of them is complete; or the nodes have checkpoints of
            different trainings. Raised on every rank.
    """
    claims: dict[int, Path] = {}
    runs: set[str] = set()
    problems: list[str] = []
    with world.together("look for checkpoints"):
        for entry in entries(directory) if reads else []:
            if entry.manifest:
                claims[entry.step] = entry.path
                runs.add(entry.manifest.run)
            else:
                problems.append(entry.problem)
        for path in half_written(directory) if reads else []:
            say(world, f"{path} is incomplete; it is skipped")
    for problem in problems:
        say(world, f"{problem}; it is skipped")
    claimed = world.allgather((sorted(claims), sorted(runs)))
    _check_one_training(world, [of_rank for _, of_rank in claimed])
    for step in sorted({step for steps, _ in claimed for step in steps}, reverse=True):
        for rank in [rank for rank, (steps, _) in enumerate(claimed) if step in steps]:
            content: tuple[Manifest, dict[str, Any]] | None = None
            if world.rank == rank:
                try:
                    with world.control.busy(f"read {claims[step]}"):
                        path = claims[step]
                        content = read(path) if step > above else (read_manifest(path), {})
                except CheckpointError as error:
                    problems.append(str(error))
                    say(world, f"{error}; it is skipped")
            content = world.broadcast_object(content, root=rank)
            if content is not None:
                manifest, state = content
                return Found(manifest, state, rank)
    problems_everywhere = [problem for of_rank in world.allgather(problems) for problem in of_rank]
    if problems_everywhere and not above:
        raise everywhere(
            CheckpointError(
                f"none of the checkpoints in {directory} is complete: {'; '.join(problems_everywhere)}. "
                "Put a complete one there, or remove them all to start over"
            )
        )
    return None


def own_part(
    world: World, name: str, parts: int, place: str | None, read_part: Callable[[int], dict[str, Any]], *, reads: bool
) -> dict[str, Any]:
    """Return this rank's part to continue from, out of the parts that the ranks kept. Collective.

    Args:
        name: the name of the checkpoint or copy to resume from.
        parts: the number of ranks that wrote a part beside it.
        place: the placement in this rank's own state now; None if it keeps none.
        read_part: reads the part of a rank; raises CheckpointError.
        reads: as for `newest`.

    Returns:
        The part that this rank wrote, if all ranks are placed as then. Otherwise `{"carried": ...}`, with sums to put
        into the next step's mean, which are empty on some ranks. {} on every rank if there is nothing.
    """
    if parts == 0:
        return {}
    part: dict[str, Any] | None = None
    if world.size == parts and place is not None:
        try:
            part = read_part(world.rank)
        except CheckpointError:
            part = None  # reported below, by the ranks that read
    if all(world.allgather(part is not None and part.get("place") == place)):
        assert part is not None
        return part
    readable: dict[int, dict[str, Any]] = {}
    problems: dict[int, str] = {}
    for rank in range(parts) if reads else []:
        try:
            readable[rank] = read_part(rank)
        except CheckpointError as error:
            problems[rank] = str(error)
    everyone = world.allgather((set(readable), problems))
    total: dict[str, Any] = {"carried": {}}
    for rank in range(parts):
        readers = [reader for reader, (could_read, _) in enumerate(everyone) if rank in could_read]
        if not readers:
            reasons = dict.fromkeys(unreadable[rank] for _, unreadable in everyone if rank in unreadable)
            world.print(
                f"mpitrain: {name}: what rank {rank} had left to send is lost. This costs the "
                "rounding of one step on that rank, or in a round of LocalSGD its steps since the round began: "
                f"{'; '.join(reasons)}"
            )
        elif readers[0] == world.rank:
            add_up(total, readable[rank])
    return total


def _check_one_training(world: World, runs: list[list[str]]) -> None:
    """Raise CheckpointError, on every rank, unless all checkpoints are of one training."""
    first: dict[str, int] = {}
    for rank, of_rank in enumerate(runs):
        for run in of_rank:
            first.setdefault(run, rank)
    if len(first) < 2:
        return
    names = ", ".join(f"{run or 'unnamed'} ({world.name(rank)})" for run, rank in first.items())
    raise everywhere(
        CheckpointError(
            f"the checkpoints are of different trainings: {names}. Remove those that you do not want to resume, or "
            "name another directory"
        )
    )
