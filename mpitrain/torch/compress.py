"""Fewer bytes on the wire in DistributedDataParallel: a communication hook from the codecs of mpitrain.compression."""

# Do not add `from __future__ import annotations`: DDP checks the annotations of a hook, and accepts no strings.

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from mpitrain.allreduce.algorithm import Progress, Sequential
from mpitrain.allreduce.compressed import compressed
from mpitrain.compression import factory_of, make_codec
from mpitrain.errors import ConfigError
from mpitrain.torch.backend import MpiProcessGroup
from mpitrain.torch.bucket_residuals import BucketResiduals

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

RESIDUALS: WeakKeyDictionary[Hook, BucketResiduals] = WeakKeyDictionary()  # of each hook


def compress(codec: str) -> Hook:
    """Make a hook for DDP that sends gradients between nodes as `codec` encodes them, with error feedback.

        model = DistributedDataParallel(net)
        model.register_comm_hook(None, mpitrain.torch.compress("bf16"))

    Inside a node, gradients travel uncompressed. The first argument of `register_comm_hook` is the process group; None
    is the group of all ranks. Sums are made in float32. The mean gives every rank the same weight, as DDP's own does.
    What the codec leaves out of a gradient is added to the same gradient in the next step. `residuals` returns it for a
    checkpoint. Sources: mpitrain/allreduce/direct.py.

    Args:
        codec: a name in mpitrain.compression.CODECS, with its setting if it takes one, as in "top_k:0.05".

    Raises:
        ConfigError: there is no such codec or setting; or, in the backward pass, a gradient is not float32, or the group does not
            use the backend mpitrain.
    """
    factory_of(codec)  # raises
    sums: dict[MpiProcessGroup, Sequential] = {}
    residuals = BucketResiduals()

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        group = group_of(state)
        world, buffer = group._channel.world, bucket.buffer()
        if buffer.dtype != torch.float32:
            raise ConfigError(
                f"{world.name()}: compress({codec!r}) takes float32 gradients, not {buffer.dtype}; make the model's "
                "parameters float32, or leave the hook out"
            )
        if group not in sums:
            sums[group] = compressed(world, make_codec(codec))
        parameters, steps = bucket.parameters(), sums[group].steps

        def work(flat: numpy.ndarray) -> Progress:
            return residuals.add_to(parameters, flat, steps) if world.size > 1 and flat.size else iter(())

        buffer.div_(world.size)
        call = group.call_of_ours(f"all_reduce by {codec}", buffer, work)
        mean: torch.futures.Future[torch.Tensor] = call.get_future().then(lambda done: done.value()[0])
        return mean

    RESIDUALS[hook] = residuals
    return hook


def group_of(state: Any) -> MpiProcessGroup:
    """Return the process group with which a hook of `compress` was registered.

    Raises:
        ConfigError: the group uses another backend.
    """
    group = dist.group.WORLD if state is None else state
    if not isinstance(group, MpiProcessGroup):
        raise ConfigError(f"compress() works in groups of the backend mpitrain, not in {group!r}")
    return group
