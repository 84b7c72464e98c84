"""Horovod's interface for PyTorch: `import mpitrain.horovod.torch as hvd`. See docs/how-to/horovod.md."""

from __future__ import annotations

from typing import Any

from mpitrain.errors import HorovodInternalError
from mpitrain.horovod import basics, process_sets
from mpitrain.horovod.basics import *  # noqa: F403
from mpitrain.horovod.names import part_or_refusal
from mpitrain.horovod.process_sets import *  # noqa: F403
from mpitrain.horovod.torch import asynchronous, differentiable, objects
from mpitrain.horovod.torch.asynchronous import *  # noqa: F403
from mpitrain.horovod.torch.compression import Compression
from mpitrain.horovod.torch.differentiable import *  # noqa: F403
from mpitrain.horovod.torch.objects import *  # noqa: F403
from mpitrain.horovod.torch.optimizer import DistributedOptimizer

__all__ = ["Compression", "DistributedOptimizer", "HorovodInternalError"]
__all__ += basics.__all__
__all__ += process_sets.__all__
__all__ += asynchronous.__all__
__all__ += differentiable.__all__
__all__ += objects.__all__

# What needs more than this is loaded when it is first used: module and name.
_PARTS = {
    "SyncBatchNorm": ("mpitrain.horovod.sync_batch_norm", "SyncBatchNorm"),
    "elastic": ("mpitrain.horovod.elastic", ""),
}


def __getattr__(name: str) -> Any:
    return part_or_refusal(__name__, name, _PARTS, __all__)
