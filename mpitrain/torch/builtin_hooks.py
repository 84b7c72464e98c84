"""DDP's built-in communication hooks for the groups of this backend.

PyTorch's built-in hooks are written in C++, and accept only backends in C++. default_hooks has the same hooks in
Python.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._C import _distributed_c10d as _c10d
from torch.nn.parallel import DistributedDataParallel

from mpitrain.torch.bare_group import BareGroup


def mend_builtin_hooks() -> None:
    """Make DDP use the Python hook for a group of this backend."""
    original: Any = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(original)
    def mended(model: DistributedDataParallel, comm_hook_type: Any) -> None:
        if isinstance(model.process_group, BareGroup):
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # few programs need it

            is_half = comm_hook_type == _c10d.BuiltinCommHookType.FP16_COMPRESS
            hook = default_hooks.fp16_compress_hook if is_half else default_hooks.allreduce_hook
            model.register_comm_hook(model.process_group, hook)
        else:
            original(model, comm_hook_type)

    DistributedDataParallel._register_builtin_comm_hook = mended  # type: ignore[method-assign]
