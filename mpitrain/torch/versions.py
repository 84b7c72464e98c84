"""What differs between versions of PyTorch, 2.11 to 2.15: the names of calls, and who records them."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d

# What old versions call, and since 2.13 new ones.
ALIASES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def with_old_names(kind: Any) -> Any:
    """A class decorator: what old versions of torch call is there too."""
    for old, new in ALIASES.items():
        setattr(kind, old, getattr(kind, new))
    return kind


def record_nothing(backend: str) -> None:
    """Since 2.15 torch records the calls of a group (flight recorder), and fails with one that is no C++ object."""
    recorders: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorders.add(backend)


def is_awaited(options: Any) -> bool:
    """Whether torch waits for the call at once; False where it does not say so."""
    return not getattr(options, "asyncOp", True)
