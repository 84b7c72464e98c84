"""ElasticSampler: the samples of an epoch that no rank has processed yet, divided among the present ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch

from mpitrain.job.start import init


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Numbers of samples for a DataLoader. Give it to TorchState, and call `record_batch` after each batch.

    All ranks have equally many samples, so the first ones are used twice if they cannot be divided.

    Attributes:
        epoch: the number of the epoch, which the order depends on.
        processed_num: the number of samples that all ranks together have processed in this epoch.
        remaining_indices: the samples that are left, in their order.
        num_samples: the number of samples of this rank among them.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """
        Args:
            dataset: has a length, the same on every rank.
            shuffle: order the samples anew in each epoch.
            seed: of the orders, the same on every rank.
        """
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all samples. Call it at the end of the one before: a reset then goes on within one."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed a batch of so many samples. `batch_idx` is not used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with the present ranks."""
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that are left among the present ranks."""
        world = init()
        self.rank, self.num_replicas = world.rank, world.size
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        everyone = islice(cycle(self.remaining_indices), self.total_size)
        return islice(everyone, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
