"""Creates process groups: torch asks for one; this module finds its ranks and makes its World."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import mpitrain
from mpitrain.allreduce.algorithm import Progress
from mpitrain.allreduce.group import Group
from mpitrain.allreduce.node_memory import meet
from mpitrain.errors import MpitrainError, ProcessGroupError
from mpitrain.job.worlds import make_world
from mpitrain.launch.launched import launched_by
from mpitrain.reducer.driver import allows_threads
from mpitrain.torch.backend import MpiProcessGroup
from mpitrain.torch.bare_group import DEVICES
from mpitrain.torch.channel import Channel
from mpitrain.torch.engine import Engine, engine_of
from mpitrain.torch.rendezvous import check_place
from mpitrain.torch.versions import record_nothing
from mpitrain.watching.activity import waiting
from mpitrain.world.world import World

_MEET_TAG = 900
_TAGS = 2**15  # as many as MPI guarantees


def register() -> None:
    """Register the backend with torch.distributed."""
    if "MPITRAIN" not in dist.Backend._plugins:
        dist.Backend.register_backend("mpitrain", _create, extended_api=True, devices=list(DEVICES))
        record_nothing("mpitrain")
    launched = launched_by(os.environ)
    if launched is not None and launched.rank is not None and torch.accelerator.current_accelerator() is None:
        # For init_process_group() without a name. Where PyTorch knows GPUs, it also makes a group for them.
        dist.Backend.default_device_backend_map["cpu"] = "mpitrain"


def _create(options: Any, _: Any) -> MpiProcessGroup:
    """Make a group. torch calls this for init_process_group and new_group, on the ranks of the group."""
    world = mpitrain.init()
    rank, size = options.group_rank, options.group_size
    members = list(options.global_ranks_in_group)
    if not members:
        check_place(world, rank, size, "init_process_group")
        members = list(range(size))
    return _make(members, str(options.group_id), options.timeout, options.store)


def _make(members: Sequence[int], name: str, timeout: timedelta, store: Any) -> MpiProcessGroup:
    """Make a group of these global ranks, all of which call this."""
    seconds = timeout.total_seconds()
    engine, world = world_of(members, f"process group {name}", seconds)
    channel = Channel(engine, world, name, seconds)

    def split(
        parent: MpiProcessGroup, chosen: Sequence[int], timeout: timedelta | None, name: str | None
    ) -> MpiProcessGroup:
        inside = [members[rank] for rank in chosen]
        duration = timedelta(seconds=channel.timeout_seconds) if timeout is None else timeout
        return _make(inside, name or f"{parent.group_name}:split:{chosen}", duration, store)

    return MpiProcessGroup(channel, world.rank, len(members), store, split)


def world_of(members: Sequence[int], name: str, seconds: float) -> tuple[Engine, World]:
    """Make a World of these global ranks, all of which call this; also return the engine that drives its calls.

    Args:
        members: the ranks, in the order that they get in the World.
        name: what the World is for. Worlds that are made at the same time have different names.
        seconds: how long the ranks may wait for each other.

    Raises:
        ProcessGroupError: a rank has not arrived in time.
        MpitrainError: MPI cannot be called from threads, or has no further communicator.
    """
    from mpi4py import MPI

    world = mpitrain.init()
    if not allows_threads():  # the result is the same on every rank
        raise MpitrainError(
            f"{world.name()}: this MPI cannot be called from several threads, which {name} needs. "
            "If the program initialises MPI itself, let it use MPI_THREAD_MULTIPLE, mpi4py's default; otherwise use an "
            "MPI that supports it"
        )
    engine = engine_of(world)
    engine.free_closed()
    doing = f"{name} of ranks {', '.join(map(str, members))} begins"
    # In MPI's own call, a rank could wait for the others without any report.
    ranks = Group(world.comm, tuple(members), list(members).index(world.rank))
    world.control.wait(_meet(ranks, doing, seconds), doing)
    assert isinstance(world.comm, MPI.Intracomm)
    try:
        with waiting(doing):
            comm = world.comm.Create_group(world.comm.group.Incl(members), tag=hash_of(name) % _TAGS)
            members_world = make_world(comm, world.config, world.generation, parent=world)
        comm.Free()
    except MPI.Exception as error:
        raise MpitrainError(
            f"{world.name()}: MPI has no further communicator ({error}); call destroy_process_group for groups that "
            "are no longer used, which frees theirs"
        ) from None
    return engine, members_world.replaced(profile=world.profile)


def hash_of(name: str) -> int:
    """Return a number for a name, the same on every rank."""
    return int.from_bytes(name.encode()[-8:], "little")


def _meet(ranks: Group, doing: str, seconds: float) -> Progress:
    deadline = time.monotonic() + seconds
    for step in meet(ranks, _MEET_TAG):
        if time.monotonic() > deadline:
            raise ProcessGroupError(f"{doing}: not all of these ranks have arrived within {seconds:g} s (timeout)")
        yield step
