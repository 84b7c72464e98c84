"""Two repairs of PyTorch's coalescing manager for the groups of this backend.

- An exception inside it ends the collecting. PyTorch's own manager leaves the group marked as collecting, at least up
  to version 2.15: all later calls of the group that can be coalesced are collected, return at once and do nothing.
- Its end waits for sends and receives, with and without `device=`. PyTorch's own manager waits only with `device=`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d

from mpitrain.torch.bare_group import BareGroup


def mend_coalescing() -> None:
    """Replace PyTorch's manager with a repaired one. Only the first call has an effect."""
    original: Any = distributed_c10d._coalescing_manager
    if hasattr(original, "is_mended"):
        return

    @functools.wraps(original)
    @contextmanager
    def mended(group: Any = None, device: torch.device | None = None, async_ops: bool = False) -> Iterator[Any]:
        group = group or distributed_c10d._get_default_group()
        collecting = distributed_c10d._world.pg_coalesce_state
        is_ours = isinstance(group, BareGroup) and group not in collecting  # otherwise an outer manager collects
        if is_ours and device is None:
            device = torch.device("cpu")  # without a device, PyTorch's manager does not wait for sends and receives
        try:
            with original(group, device, async_ops) as calls:
                yield calls
        except BaseException:
            if is_ours:
                collecting.pop(group, None)
                group.stop_collecting()
            raise

    vars(mended)["is_mended"] = True
    for module in (distributed_c10d, torch.distributed):
        module._coalescing_manager = mended  # type: ignore[attr-defined]
