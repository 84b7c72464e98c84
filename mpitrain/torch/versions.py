"""Differences between the versions of PyTorch from 2.11 to 2.15: the names of calls, and their recording."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d

# The old names of calls, and the names since 2.13.
ALIASES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def with_old_names(kind: Any) -> Any:
    """Decorate a class so that it also has the names that old versions of torch call."""
    for old, new in ALIASES.items():
        setattr(kind, old, getattr(kind, new))
    return kind


def record_nothing(backend: str) -> None:
    """Switch off the flight recorder: since 2.15 torch records a group's calls, and fails if the group is not a C++
    object."""
    recorders: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorders.add(backend)


def is_awaited(options: Any) -> bool:
    """True if torch says that it waits for the call at once."""
    return not getattr(options, "asyncOp", True)
