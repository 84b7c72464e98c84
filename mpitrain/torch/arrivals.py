"""The wait of a monitored barrier: each rank tells every other that it has arrived."""

from __future__ import annotations

import torch

from mpitrain.errors import ProcessGroupError
from mpitrain.torch.channel import WORD_TAG, Channel
from mpitrain.torch.flat_tensors import raw
from mpitrain.torch.work import Call


def wait_for_all(channel: Channel, seconds: float | None) -> None:
    """Wait until every rank of the group has called this. None: the group's timeout.

    Raises:
        ProcessGroupError: some ranks have not arrived in time. Raised on the ranks that have.
    """
    world = channel.world
    channel.check("monitored_barrier")
    channel.num_monitored += 1
    seconds = channel.timeout_seconds if seconds is None else seconds
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
    """True if this rank's message arrived in time."""
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
        # The message belongs to an earlier barrier, for which it came too late.
        call = channel.receive(
            Call(channel, call.name, call.results, call.seconds), raw(call.results[0]), rank, WORD_TAG
        )
