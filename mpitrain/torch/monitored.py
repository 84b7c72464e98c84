"""A barrier that names missing ranks. PyTorch's own function supports gloo only."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpitrain.torch.bare_group import BareGroup


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until every rank of the group has called this. If some do not, raise an error that names them.

    After `import mpitrain.torch`, `torch.distributed.monitored_barrier` does the same. All ranks of the group call
    this. Every rank sends every other rank a message, so each rank that has arrived knows which ranks are missing. This
    takes p - 1 messages of 8 bytes per rank. After an error the group still works. A rank that comes later finds the
    others' messages, and passes.

    Args:
        group: a group of the backend mpitrain, or of gloo. Default: all ranks.
        timeout: how long to wait; a number is in seconds. Default: the group's timeout.
        wait_all_ranks: accepted as in PyTorch. The error names all missing ranks either way.

    Raises:
        ProcessGroupError: some ranks have not arrived within the timeout. Raised on the ranks that have; it names the
            missing ranks and their hosts.
    """
    group = dist.group.WORLD if group is None else group
    if isinstance(group, BareGroup):
        group.monitored_barrier(timeout, wait_all_ranks)
    else:
        _original(group, timeout, wait_all_ranks)


_original = distributed_c10d.monitored_barrier


def mend_monitored_barrier() -> None:
    """Make PyTorch's own function accept groups of this backend, for programs that were written for gloo."""
    for module in (distributed_c10d, dist):
        module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]
