"""Sums of sparse tensors: every rank gets the indices and values of all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpitrain.horovod.operators import Operator
from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.horovod.state import current
from mpitrain.horovod.torch.moving import gather
from mpitrain.horovod.torch.reducing import Average
from mpitrain.horovod.torch.submission import synchronize


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
    return begin_sparse("sparse_allreduce", tensor, name, op, process_set)


def begin_sparse(
    kind: str, tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet
) -> Callable[[], torch.Tensor]:
    """Begin to add up a sparse tensor in a call of this kind. See sparse_allreduce_async."""
    if op not in (Operator.Average, Operator.Sum):
        raise ValueError(f"{current().world.name()}: {Operator(op).name} of a sparse tensor; use Average or Sum")
    whole = tensor.coalesce()
    handle = gather(kind, [whole.indices().t().contiguous(), whole.values()], name, process_set, is_list=True)

    def result() -> torch.Tensor:
        indices, values = synchronize(handle)
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True).coalesce()
        return total / len(process_set.ranks) if op == Operator.Average else total

    return result
