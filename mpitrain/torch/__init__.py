"""PyTorch over MPI with nothing compiled: `import mpitrain.torch`.

    import mpitrain.torch
    torch.distributed.init_process_group("mpitrain")

The import registers the backend `mpitrain` with torch.distributed, for tensors on the CPU and on GPUs. `Trainer` and
`prepare` need no process group.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(f"mpitrain.torch needs PyTorch ({error}); pip install 'mpitrain[torch]'") from error

from mpitrain.torch.builtin_hooks import mend_builtin_hooks
from mpitrain.torch.coalescing import mend_coalescing
from mpitrain.torch.compress import compress
from mpitrain.torch.groups import register
from mpitrain.torch.keep import keep
from mpitrain.torch.monitored import mend_monitored_barrier, monitored_barrier
from mpitrain.torch.norm_layers import watch_norm_layers
from mpitrain.torch.observed import watch
from mpitrain.torch.own_steps import watch_own_steps
from mpitrain.torch.prepare import accumulate, end_round, prepare, virtual_batches, weight
from mpitrain.torch.rendezvous import offer
from mpitrain.torch.residuals import residuals, restore_residuals
from mpitrain.torch.trainer import TorchTrainer as Trainer
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.whole_loop import load, save, shard
from mpitrain.world.world import World

__all__ = [
    "Trainer",
    "accumulate",
    "compress",
    "end_round",
    "keep",
    "load",
    "monitored_barrier",
    "prepare",
    "residuals",
    "restore_residuals",
    "save",
    "shard",
    "virtual_batches",
    "weight",
]

uncompiled(World)  # a compiled function may call its methods
offer()
register()
mend_coalescing()
mend_monitored_barrier()
mend_builtin_hooks()
watch()
watch_norm_layers()
watch_own_steps()
