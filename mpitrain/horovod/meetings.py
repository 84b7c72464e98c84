"""Calls in which ranks only wait for each other."""

from __future__ import annotations

from mpitrain.horovod import operations
from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.horovod.state import channel_of
from mpitrain.horovod.waits import ended


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's scripts give it
    """Say that this rank has no more data. It contributes zeros to the allreduces of the others until all have joined.

    Args:
        device: ignored; a rank that has joined works on the host.

    Returns:
        The rank that joined last.
    """
    channel = channel_of(global_process_set)
    return int(ended(channel.submit(operations.join(channel), hurries=False)))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a set have made this call."""
    channel = channel_of(process_set)
    ended(channel.submit(operations.barrier(channel, channel.key("barrier", None)), hurries=False))
