"""Norm layers whose results differ from one process, because a rank has only a part of each batch.

- Those in training mode outside of the prepared model, such as those of a teacher or of an average, get running
  statistics of each rank's own. mpitrain cannot know which modules belong together on the ranks, so it warns.
- Those that cannot compute with a rank's part of one sample, where one process has more: said on all ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from mpitrain.errors import DataError, everywhere
from mpitrain.torch.drawn import Share
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.world.world import World

_layers: WeakSet[_NormBase] = WeakSet()
_prepared: WeakSet[_NormBase] = WeakSet()
_told: WeakSet[_NormBase] = WeakSet()


def watch_norm_layers() -> None:
    """Note all norm layers that are made or copied from now on."""
    make, fill = _NormBase.__init__, _NormBase.__setstate__

    def make_and_note(layer: _NormBase, *args: Any, **kwargs: Any) -> None:
        make(layer, *args, **kwargs)
        _layers.add(layer)

    def fill_and_note(layer: _NormBase, state: Any) -> None:  # of a copy
        fill(layer, state)  # type: ignore[no-untyped-call]
        _layers.add(layer)

    _NormBase.__init__ = make_and_note  # type: ignore[method-assign, assignment]
    _NormBase.__setstate__ = fill_and_note  # type: ignore[method-assign, assignment]


def are_prepared(model: torch.nn.Module) -> None:
    """Do not warn about the layers of this model: its buffers are exchanged."""
    _prepared.update(module for module in model.modules() if isinstance(module, _NormBase))


def counts_of_others() -> dict[_NormBase, int]:
    """Return how many batches the layers of other models have seen in training mode."""
    counts = {layer: layer.num_batches_tracked for layer in _layers - _prepared - _told}
    return {layer: int(count) for layer, count in counts.items() if count is not None}


def tell_of_statistics(world: World, before: dict[_NormBase, int]) -> None:
    """Warn about layers that have seen more batches than `before`."""
    changed = {layer for layer, count in counts_of_others().items() if count != before.get(layer, count)}
    _told.update(changed)
    if changed:  # DDP sends its buffers itself
        # By type: isinstance would read the object's __class__, which other libraries' proxies compute.
        wrapped = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
        changed -= {module for one in wrapped for module in one.modules() if isinstance(module, _NormBase)}
    if not changed:
        return
    world.print(
        f"mpitrain: {len(changed)} norm layers ({', '.join(sorted({type(layer).__name__ for layer in changed}))}) of a "
        "model that prepare() was not given ran in training mode on parts of the batches, so each rank has running "
        "statistics of its own. For update_bn, give it the loader that prepare() was given: update_bn(data.given, "
        "model). Let a teacher compute in teacher.eval(), with the buffers of the trained model"
    )


class SingleSamples:
    """Watches the norm layers while a batch is in use of which some rank has a single sample and other ranks have
    more."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._end: Callable[[], None] | None = None

    def take(self, number: int, share: Share) -> None:
        """Start watching the batch with this number."""
        if 1 < share.total < 2 * self._num_ranks and not share.virtual:
            at = f"batch {number - 1} has {share.total} samples for {self._num_ranks} ranks"
            handle = register_module_forward_pre_hook(_Look(at, max(share.count, 1)))
            self._end = handle.remove

    def end(self) -> None:
        """No batch is in use any more."""
        if self._end is not None:
            self._end()
        self._end = None


@uncompiled
class _Look:
    """A hook before the forward pass of each module."""

    def __init__(self, at: str, count: int) -> None:
        self._at, self._count = at, count

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        """Raise DataError, on every rank, if a layer needs several values, and each sample has one."""
        if isinstance(module, _BatchNorm):
            channels = module.num_features if module.training or module.running_mean is None else 0
        else:
            channels = module.num_groups if isinstance(module, torch.nn.GroupNorm) else 0
        if channels and inputs and inputs[0].numel() == self._count * channels:
            raise everywhere(
                DataError(
                    f"all ranks: {self._at}, so a rank computes with one of them, and {type(module).__name__} needs "
                    "more than one value for each channel, as one process has. Leave such a batch out with "
                    "drop_last=True, or take a batch_size that leaves each rank 2 samples of the last batch"
                )
            )
