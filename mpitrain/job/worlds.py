"""make_world makes a World from the ranks of a communicator; own_cores counts the cores of each of its ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.collectives.trees import ArrayTrees
from mpitrain.config import Config
from mpitrain.context import JobContext
from mpitrain.errors import LaunchError, everywhere
from mpitrain.waiting.background import Background, Queue
from mpitrain.waiting.control import Control
from mpitrain.waiting.notes import Notes
from mpitrain.watching.view import process_numbering
from mpitrain.world.world import World


def own_cores(world: World) -> float:
    """The number of this machine's cores per rank, counting also its ranks in other hosts, such as containers.

    Collective. Ranks may be bound to different cores: every core that some rank may use counts.
    """
    machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    of_all = world.allgather((machine, os.sched_getaffinity(0)))
    here = [cores for one, cores in of_all if one == machine]
    return len(set().union(*here)) / len(here)


if TYPE_CHECKING:
    from mpi4py import MPI

# Per rank: a World's number is made from its first rank, and from the number of Worlds that this rank was in before.
_MOST_WORLDS = 2**32

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def make_world(
    comm: MPI.Comm,
    config: Config | None = None,
    generation: int = 0,
    parent: World | None = None,
    members: Sequence[int] | None = None,
) -> World:
    """A World over the ranks of `comm`, which stays the caller's own. Collective over `comm`.

    Until the World exists, all messages go over `comm`, and every communicator is made from `comm`. So if a rank is
    lost in the middle, no rank waits for it elsewhere.

    Args:
        parent: a World that has all ranks of `comm`. The new one then receives the notes of the same job, its ranks
            keep their names, and it is freed before its parent. Default: the World has all ranks of the job.
        members: without a parent, the numbers that the ranks have in the job. Default: those that they have in `comm`.
    """
    made_so_far = len(parent.control.notes.made) if parent else 0
    machine = socket.gethostname(), _boot_id(), process_numbering()
    machines, serials = zip(*comm.allgather((machine, made_so_far)), strict=True)
    hosts = tuple(host for host, *_ in machines)
    here = list(range(comm.size))
    comms = [comm.Dup() for _ in range(4 if parent else 5)]
    if parent:
        notes = parent.control.notes
        ranks = comm.group.Translate_ranks(here, parent.comm.group)
        members = [parent.control.members[rank] for rank in ranks]
        number = members[0] * _MOST_WORLDS + serials[0]
    else:
        members, number = members or here, 0
        notes = Notes(comms[4], members)
    control = Control(notes, comms[3], hosts, members, number, parent.control if parent else None)
    control.comms += comms
    return World(
        comm=comms[0],
        objects=comms[1],
        queue=Queue(control),
        background=Background(comms[2], control),
        hosts=hosts,
        node_ranks=numbered(machines),
        generation=generation,
        config=config or Config(),
        context=JobContext.read(os.environ),
        control=control,
        make_arrays=ArrayTrees,
        owned=[partial(control.give_back, duplicate) for duplicate in comms],
        parent=parent,
    )


def numbered(machines: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the node rank of every rank: nodes count in the order of their lowest ranks.

    Ranks share memory if they have the same host name, boot and process numbering: they find each other's memory
    through /proc. MPI's own split of a communicator treats two containers as one node. After a rank has joined or left,
    that split may treat two nodes as one.
    """
    order = list(dict.fromkeys(machines))
    return tuple(order.index(machine) for machine in machines)


def check_containers(world: World) -> None:
    """Refuse ranks that MPI considers to be on one node, but that cannot see each other's processes. Collective.

    Raises:
        LaunchError: MPI would read the memory of processes that it cannot see. Raised on every rank.
    """
    if world.num_nodes == 1:
        return
    numberings = world.allgather(process_numbering())
    if len(set(numberings)) == 1:
        return
    from mpi4py import MPI

    neighbours = world.comm.Split_type(MPI.COMM_TYPE_SHARED)
    here = neighbours.group.Translate_ranks(list(range(neighbours.size)), world.comm.group)
    neighbours.Free()
    unseen = next((rank for rank in here if numberings[rank] != numberings[world.rank]), None)
    for rank, other in enumerate(world.allgather(unseen)):
        if other is not None:
            raise everywhere(
                LaunchError(
                    f"{world.name(rank)} and {world.name(other)} are in different containers on one machine, but MPI "
                    "takes them for ranks of one node: it would read the memory of processes that it cannot see. Run "
                    "the ranks in one container, or start the containers with --pid=host"
                )
            )


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text()
    except OSError:  # not Linux, or a /proc without this entry: the other two must be enough
        return ""
