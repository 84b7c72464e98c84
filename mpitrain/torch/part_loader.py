"""A DataLoader of numbered samples, from which each rank reads its part of the batches of all ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from mpitrain.errors import ConfigError, everywhere
from mpitrain.strategies.virtual_ranks import VirtualRanks
from mpitrain.torch.drawn import PartSampler
from mpitrain.torch.seeded_samples import SeededSamples, begin_worker
from mpitrain.world import World


def part_loader(
    world: World, loader: DataLoader[Any], virtual: VirtualRanks | None
) -> tuple[DataLoader[Any], PartSampler]:
    """Return a loader that yields this rank's part of each batch, and its sampler. `loader` is not changed."""
    sampler = PartSampler(world, loader.batch_sampler, virtual)
    own = copy.copy(loader)  # keep everything, also workers and pinned memory, except the batches
    vars(own).update(batch_sampler=sampler, in_order=True, _iterator=None)
    if virtual:
        begin = partial(begin_worker, loader.dataset, loader.worker_init_fn)
        vars(own).update(dataset=SeededSamples(loader.dataset), worker_init_fn=begin)
    return own, sampler


def refuse_distributed(loader: DataLoader[Any]) -> None:
    """Raise ConfigError on every rank if a loader already divides the samples among ranks."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise everywhere(
            ConfigError(
                "the DataLoader has a DistributedSampler, which divides samples among ranks; prepare() does that. "
                "Leave the sampler out: pass shuffle=True, and a batch_size for all ranks together"
            )
        )
