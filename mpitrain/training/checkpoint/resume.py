"""Which checkpoint all ranks go on from: the newest whole one that any of the directories has.

Where all nodes see one directory, rank 0 reads it. Where they do not, one rank looks into each of those there are, and
the lowest of them that has the newest whole checkpoint reads it. The state is sent to all ranks, so a node that has
lost its disk, or was not there before, needs no copy of its own.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import CheckpointError, everywhere
from mpitrain.training.checkpoint.manifest import Manifest, read_manifest
from mpitrain.training.checkpoint.parts import add_up
from mpitrain.training.checkpoint.store import entries, half_written, make_directory, read
from mpitrain.world import World


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from; the same on every rank.

    Attributes:
        manifest, state: of it; the arrays are on the host.
        rank: that has read it.
    """

    manifest: Manifest
    state: dict[str, Any]
    rank: int


def is_first_of_node(world: World) -> bool:
    """This rank is the lowest of its node: it looks after the node's copy."""
    return world.node_ranks.index(world.node_rank) == world.rank


def say(world: World, text: str) -> None:
    """A line on stderr with this rank's name."""
    print(f"mpitrain: {world.name()}: {text}", file=sys.stderr, flush=True)


def keepers(world: World, directory: Path, copies: int | None) -> dict[int, int]:
    """By node the one whose first rank looks after the directory that it sees: itself, or one before it. Collective.

    Directories are made if need be.

    Args:
        copies: nodes that see none of so many directories are left out; None: there are none such.

    Raises:
        CheckpointError: one of those ranks cannot write there. On every rank.
    """
    keeper_of_node: dict[int, int] = {}
    while len(keeper_of_node) < world.num_nodes and (copies is None or len(set(keeper_of_node.values())) < copies):
        keeper = min(set(world.node_ranks) - keeper_of_node.keys())
        root = world.node_ranks.index(keeper)
        token = directory / f".seen-{uuid.uuid4().hex}"  # a new name, which no cache of a network file system knows
        with world.together("use the checkpoint directory"):
            if world.rank == root:
                _check_writable(directory, token)
        name = world.broadcast(token.name, root=root)
        # os.path, because Path.exists() raises for a directory that this user may not enter.
        sees = world.allgather(is_first_of_node(world) and os.path.exists(directory / name))  # noqa: PTH110
        if world.rank == root:
            with suppress(OSError):
                token.unlink()
        seeing = {world.node_ranks[rank] for rank, saw in enumerate(sees) if saw} | {keeper}
        # An earlier one sees it where this one did not see the earlier one's: a cache had no such directory yet.
        first = min((keeper_of_node[node] for node in seeing if node in keeper_of_node), default=keeper)
        keeper_of_node |= dict.fromkeys(seeing - keeper_of_node.keys(), first)
    return keeper_of_node


def _check_writable(directory: Path, token: Path) -> None:
    """Make the directory and the empty file `token` in it, which needs no room on a full disk.

    Raises:
        CheckpointError: that failed.
    """
    try:
        make_directory(directory)
        for left in directory.glob(".seen-*"):  # by a job that was killed in its first moments
            left.unlink(missing_ok=True)
        token.touch()
    except OSError as error:
        raise CheckpointError(
            f"cannot write into the checkpoint directory {directory}: {error.strerror or error}; "
            "name one that this user can write to"
        ) from error


def newest(world: World, directory: Path, *, reads: bool, above: int = 0) -> Found | None:
    """The newest whole checkpoint, or None where there never was one. Collective.

    If the step of the newest one is not `above` that of a copy in memory, its state is not read, and {}.

    Names on stderr what is damaged or half written, and passes it over.

    Args:
        reads: this rank looks into its directory; the same ranks' manifests are compared.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole; or those of different nodes are of
            different trainings. On every rank.
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
            content = world.broadcast(content, root=rank)
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
    """What this rank goes on from, of what the ranks kept for themselves. Collective.

    Args:
        name: of what is gone on from.
        parts: the number of ranks that wrote a part beside it.
        place: the entry of that name in this rank's own state now; None where it keeps none.
        read_part: reads what a rank has written; raises CheckpointError.
        reads: as for `newest`.

    Returns:
        the part that this rank wrote, where all ranks are placed as then; else `{"carried": ...}` on some ranks, with
        the sums that are to be put into the next step's mean; {} where there is nothing.
    """
    if parts == 0:
        return {}
    part: dict[str, Any] | None = None
    if world.size == parts and place is not None:
        try:
            part = read_part(world.rank)
        except CheckpointError:
            part = None  # told below, by those who read
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
    total: dict[str, Any] = {}
    for rank in range(parts):
        readers = [reader for reader, (could_read, _) in enumerate(everyone) if rank in could_read]
        if not readers:
            reasons = dict.fromkeys(unreadable[rank] for _, unreadable in everyone if rank in unreadable)
            world.print(
                f"mpitrain: {name}: what rank {rank} had left to send is lost, which costs its "
                f"rounding of one step: {'; '.join(reasons)}"
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
