"""The in-memory checkpoint from which all ranks continue: the newest complete one on any host of the job.

Hosts with that copy read their own. The others get it from one of them. A rank's own state (resume.py) is kept beside
the copy, by the snapshot agent of the rank's earlier host.

A rank may have been killed before it copied the changes of a command in a pause. Its host then has a copy of the same
step with an earlier edition, and counts as a host without the copy.

In a round of LocalSGD, each host's copy has the model of its own first rank. The parts of all ranks replace that. If a
rank cannot get its part back, all hosts get the first copy. The same applies to differing copies of a later edition.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import numpy

from mpitrain.errors import CheckpointError
from mpitrain.job.worlds import make_world
from mpitrain.launch.kept import KeeperLine
from mpitrain.state.memory_slot import Copy, MemorySlot, read_copy
from mpitrain.state.resume import is_first_of_node
from mpitrain.watching.activity import waiting
from mpitrain.world.world import World

_STATE = "state"


def state_name(run: int) -> str:
    """The name of a run's state at the snapshot agent; `run` counts the runs of trainers in a process."""
    return f"{run}/{_STATE}"


def part_name(run: int, rank: int) -> str:
    """The name of a rank's own state."""
    return f"{run}/{_part(rank)}"


def slots_of(line: KeeperLine, name: str) -> list[MemorySlot]:
    """The two slots that are kept under a name; [] if none are.

    Raises:
        OSError: the snapshot agent does not answer.
    """
    return [MemorySlot(descriptor) for descriptor in line.give(name)]


class KeptCopies:
    """The copies of one run at the snapshot agents of all hosts. Nothing is read before all ranks ask for it.

    Attributes:
        version: the step and the edition of the copy to continue from; (0, 0): there is none.
    """

    def __init__(self, world: World, line: KeeperLine | None, run: int) -> None:
        """Find the copies. Collective. `line` connects to the snapshot agent of this rank's host; None: there is
        none."""
        self._world, self._line, self._run = world, line, run
        here: dict[str, dict[tuple[int, int], int]] = {}
        with world.together("look for in-memory checkpoints"):
            if line is not None and is_first_of_node(world):
                here = _whole(line, run)
        everyone = world.allgather(here)
        self._holders: dict[tuple[int, int], list[int]] = {}  # by version: the first ranks of the nodes that have it
        parts: dict[tuple[int, int], int] = {}
        for rank, names in enumerate(everyone):
            for version, num_parts in names.get(_STATE, {}).items():
                self._holders.setdefault(version, []).append(rank)
                parts[version] = num_parts

        def is_complete(version: tuple[int, int]) -> bool:
            kept = {name for names in everyone for name, versions in names.items() if version in versions}
            return kept >= {_part(rank) for rank in range(parts[version])}

        newest = [*sorted(self._holders, reverse=True), (0, 0)]
        # A rank may have been killed before it had copied its part of the newest version.
        self.version = chosen = next(filter(is_complete, newest[:-1]), newest[0])
        first_ranks = [world.node_ranks.index(node) for node in world.node_ranks]
        has_part = [chosen in everyone[first].get(_part(rank), {}) for rank, first in enumerate(first_ranks)]
        num_parts = parts.get(chosen, 0)
        self._may_differ = num_parts > 0 and not (num_parts == world.size and all(has_part))
        self._may_differ |= chosen[1] > 0  # each host counts its editions by itself

    @property
    def step(self) -> int:
        """The step of the copy to continue from; 0: there is none."""
        return self.version[0]

    def drop_newer(self) -> None:
        """Drop newer, incomplete copies: a rank that continues writes different states with the same versions.

        Every rank calls this before a collective call, after which no host has such a copy.
        """
        if self._line is None or not is_first_of_node(self._world):
            return
        with suppress(OSError):  # a keeper that does not answer holds nothing
            for name in _names(self._line, self._run):
                for slot in slots_of(self._line, name):
                    if slot.version > self.version:
                        slot.clear()
                    slot.close()

    def read(self) -> Copy:
        """The copy of `version`, which is not (0, 0). Collective."""
        world, holders = self._world, self._holders[self.version]
        nodes = {world.node_ranks[rank] for rank in holders}
        content = numpy.zeros(0, numpy.uint8)
        with world.together("read the in-memory checkpoint"):
            if world.node_rank in nodes:
                content = self._content(_STATE)
        if self._may_differ:
            digests = world.allgather(sha256(content.data).digest() if world.rank in holders else b"")
            nodes = {world.node_ranks[rank] for rank in holders if digests[rank] == digests[holders[0]]}
        if len(nodes) < world.num_nodes:
            lacking = [rank for rank in range(world.size) if world.node_ranks[rank] not in nodes]
            content = _sent(world, content, holders[0], lacking)
        return read_copy(content)

    def part(self, rank: int) -> dict[str, Any]:
        """The own state of `rank`, from the snapshot agent of this host.

        Raises:
            CheckpointError: this agent has no such part of this version.
        """
        return read_copy(self._content(_part(rank))).state

    def _content(self, kind: str) -> numpy.ndarray:
        name = f"{self._run}/{kind}"
        try:
            slots: Sequence[MemorySlot] = slots_of(self._line, name) if self._line else ()
        except OSError as error:
            raise CheckpointError(f"{self._world.name()}: the keeper of this host does not answer: {error}") from None
        contents = [slot.content() for slot in slots if slot.version == self.version]
        for slot in slots:
            slot.close()
        if not contents:
            raise CheckpointError(f"{self._world.name()}: the memory of this host has no {name} of step {self.step}")
        return contents[0]


def _sent(world: World, content: numpy.ndarray, holder: int, lacking: Sequence[int]) -> numpy.ndarray:
    """On each of `lacking`, the `content` of `holder`; on the other ranks, their own. Collective over `world`."""
    takers = sorted([holder, *lacking])
    with waiting("send a copy to the hosts without it"):
        comm = world.comm.Split(int(world.rank in takers), world.rank)  # the other ranks have it and need not wait
        part = make_world(comm, parent=world) if world.rank in takers else None
    if part is not None:
        root = takers.index(holder)
        size = part.broadcast_object(len(content), root)
        # Other ranks may have another copy, which stays as it is.
        room = content if world.rank == holder else numpy.empty(size, numpy.uint8)
        sent = part.broadcast({"copy": room}, root)["copy"]
        content = content if world.rank == holder else sent
        part.free()
    comm.Free()
    return content


def _part(rank: int) -> str:
    return f"rank-{rank}"


def _names(line: KeeperLine, run: int) -> list[str]:
    """The names of everything that this host keeps of a run."""
    return [name for name in line.names() if int(name.partition("/")[0]) == run]


def _whole(line: KeeperLine, run: int) -> dict[str, dict[tuple[int, int], int]]:
    """The versions of the complete copies of a run on this host, by kind, with the number of their parts."""
    copies: dict[str, dict[tuple[int, int], int]] = {}
    try:
        for name in _names(line, run):
            slots = slots_of(line, name)
            copies[name.partition("/")[2]] = {slot.version: slot.parts for slot in slots if slot.step}
            for slot in slots:
                slot.close()
    except OSError:  # a keeper that does not answer holds nothing
        return {}
    return copies
