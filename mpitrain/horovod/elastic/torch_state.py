"""TorchState: models, optimizers and samplers, beside other objects. ElasticSampler: the rest of an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch

from mpitrain.horovod.elastic.state import ObjectState
from mpitrain.job.start import init
from mpitrain.state.keep import RankState
from mpitrain.torch.keep import TorchRankState


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Numbers of the samples of an epoch that no rank has processed yet, for a DataLoader; each rank has its part.

    Give it to TorchState, and call `record_batch` after each batch.

    All ranks have the same number of samples, so the first samples are used twice if they cannot be divided equally.

    Attributes:
        epoch: the number of the epoch, which the order depends on.
        processed_num: the number of samples that all ranks together have processed in this epoch.
        remaining_indices: the remaining samples, in their order.
        num_samples: the number of samples of this rank among them.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """
        Args:
            dataset: has a length, the same on every rank.
            shuffle: draw a new order in each epoch.
            seed: of the orders, the same on every rank.
        """
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all samples. Call it at the end of the previous epoch, so that a reset always continues
        within one."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed a batch of `batch_size` samples. `batch_idx` is not used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with the current ranks."""
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
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


class TorchState(ObjectState):
    """A model, an optimizer and more, each an attribute of the state. Objects with a state_dict are loaded in place."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """
        Args:
            model: a torch.nn.Module, or None.
            optimizer: of torch or of hvd.DistributedOptimizer, or None.
            kwargs: more of these by name, samplers, learning-rate schedulers, and other objects that pickle can write.
        """
        given = {"model": model, "optimizer": optimizer, **kwargs}
        super().__init__(**{name: value for name, value in given.items() if value is not None or name in kwargs})
        for name in given.keys() - set(self._names):
            setattr(self, name, None)

    def state_dict(self) -> dict[str, Any]:
        """Return by name the state_dict of each object that has one, with its tensors on the CPU, and the other
        objects."""
        values = super().state_dict()
        return {name: on_host(value.state_dict()) if _is_loaded(value) else value for name, value in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load into objects that have a state_dict, and set the other objects. See ObjectState."""
        loaded = {name for name in self._names if _is_loaded(getattr(self, name))}
        super().load_state_dict({name: getattr(self, name) if name in loaded else state[name] for name in state})
        for name in loaded:
            getattr(self, name).load_state_dict(state[name])

    def sync(self) -> None:
        """Take over rank 0's state, and save it. Samplers divide the remaining samples among the current ranks.
        Collective."""
        super().sync()
        for name in self._names:
            if isinstance(sampler := getattr(self, name), ElasticSampler):
                sampler.reset()

    def of_rank(self) -> RankState:
        """Return the states of the CPU's random generators."""
        return TorchRankState(())


def _is_loaded(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def on_host(value: Any) -> Any:
    """Return the same nesting of dicts, lists and tuples, with its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_host(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_host(entry) for entry in value)
    return value
