"""Sums of sparse tensors: every rank gets the indices and values of all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpitrain.horovod.operators import Operator
from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.horovod.state import current
from mpitrain.horovod.torch.calls import Average, allgather_async, synchronize


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to add up a sparse tensor over the ranks of a set.

    Args:
        tensor: of layout sparse_coo, with the same shape, dtype and number of sparse dimensions on all ranks.
        name: ranks meet by it.
        op: Average (default) or Sum.
        process_set: its ranks make the call.

    Returns:
        A function that waits for the result, and returns it: a sparse tensor, coalesced.

    Raises:
        ValueError: the operator is neither Average nor Sum; or see allreduce_async.
    """
    if op not in (Operator.Average, Operator.Sum):
        raise ValueError(f"{current().world.name()}: {Operator(op).name} of a sparse tensor; use Average or Sum")
    whole = tensor.coalesce()
    indices = allgather_async(whole.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(whole.values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        total = torch.sparse_coo_tensor(
            synchronize(indices).t(), synchronize(values), tensor.shape, check_invariants=False
        ).coalesce()
        return total / len(process_set.ranks) if op == Operator.Average else total

    return result
