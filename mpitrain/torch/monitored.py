"""A barrier that names missing ranks. PyTorch's own works only with gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from mpitrain.errors import ProcessGroupError
from mpitrain.torch.backend import MpiProcessGroup
from mpitrain.torch.channel import WORD_TAG
from mpitrain.torch.flat_tensors import raw
from mpitrain.torch.work import Call


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of the group has called this. If some do not, raise an error that names them.

    All ranks of the group call this. Every rank sends every other rank a message, so each rank that has arrived knows
    which ranks are missing. This takes p - 1 messages of 8 bytes per rank. After an error the group still works. A rank
    that comes later finds the others' messages, and passes.

    Args:
        group: a group of the backend mpitrain, or of gloo. Default: all ranks.
        timeout: how long to wait. Default: the group's timeout.
        wait_all_ranks: accepted as in PyTorch. The error names all missing ranks either way.

    Raises:
        ProcessGroupError: some ranks have not arrived within the timeout. Raised on the ranks that have; it names the
            missing ranks and their hosts.
    """
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, MpiProcessGroup):
        dist.monitored_barrier(group, timeout, wait_all_ranks)
        return
    channel = group._channel
    world = channel.world
    channel.check("monitored_barrier")
    channel.num_monitored += 1
    seconds = channel.timeout_seconds if timeout is None else timeout.total_seconds()
    others = [rank for rank in range(world.size) if rank != world.rank]
    own_count = torch.tensor([channel.num_monitored])
    arrivals = []
    for rank in others:
        note = torch.empty(1, dtype=torch.int64)
        call = Call(channel, f"monitored_barrier: word of {world.name(rank)}", [note], seconds)
        arrivals.append(channel.receive(call, raw(note), rank, WORD_TAG))
        channel.send(Call(channel, "monitored_barrier", [own_count], seconds), raw(own_count), rank, WORD_TAG)
    missing = [rank for rank, call in zip(others, arrivals, strict=True) if not _has_come(call, rank)]
    if missing:
        raise ProcessGroupError(
            f"{world.name()}: monitored_barrier in {channel}: {', '.join(world.name(rank) for rank in missing)} "
            f"{'has' if len(missing) == 1 else 'have'} not arrived within {seconds:g} s. {channel.engine.who_waits()}"
        )


def _has_come(call: Call, rank: int) -> bool:
    """True if this rank's message has come in time."""
    channel = call.channel
    while True:
        channel.engine.wait(call)
        if call.error is not None:
            if channel.world.control.is_broken:
                raise call.error
            return False
        channel.words_read[rank] += 1
        if int(call.results[0]) >= channel.num_monitored:
            return True
        # The message came too late for an earlier barrier.
        call = channel.receive(
            Call(channel, call.name, call.results, call.seconds), raw(call.results[0]), rank, WORD_TAG
        )
