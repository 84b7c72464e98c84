"""The named calls on tensors that return a handle at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.horovod.torch.calls import (
    Adasum,
    Average,
    Handle,
    How,
    Max,
    Min,
    Product,
    Sum,
    Tensors,
    begin_allgather,
    begin_allreduce,
    begin_alltoall,
    begin_broadcast,
    begin_reducescatter,
    begin_sparse,
)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


def poll(handle: Handle) -> bool:
    """Return whether a call has ended, so that synchronize() returns at once."""
    # The answer is from before this check. So a call is never complete at once, even with a single rank.
    was_done = handle.is_done
    handle.channel.engine.look()
    return was_done


def synchronize(handle: Handle) -> Any:
    """Wait for a call, and return its result: a tensor, a list of tensors, or a pair of tensors of alltoall.

    Raises:
        HorovodInternalError: the call has failed: the ranks differ, or one of them is gone.
    """
    return handle.ended()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce a tensor over the ranks of a process set. The result is a new tensor.

    Args:
        tensor: any dense tensor of numbers, with the same shape and dtype on all ranks.
        average: deprecated: True stands for op=Average, False for op=Sum.
        name: ranks meet by it. Default: the number of the call among those without a name.
        op: Average (default), Sum, Adasum, Min, Max or Product. Average is the mean over ranks, not over samples.
        prescale_factor, postscale_factor: multiply the values before, and the result after.
        process_set: its ranks make the call.

    Raises:
        ValueError: a call with this name is under way; or this rank is not in the set.
        TypeError: the tensor cannot be sent.
    """
    how = How(op, average, prescale_factor, postscale_factor)
    return begin_allreduce("allreduce", [tensor], name, how, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to replace a tensor by the result of all ranks. See allreduce_async."""
    how = How(op, average, prescale_factor, postscale_factor)
    return begin_allreduce("allreduce", [tensor], name, how, process_set, in_place=True)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce several tensors as one call. The result is a list of new tensors. See allreduce_async."""
    how = How(op, average, prescale_factor, postscale_factor)
    return begin_allreduce("grouped_allreduce", tensors, name, how, process_set)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to replace several tensors by the results of all ranks, as one call. See allreduce_async."""
    how = How(op, average, prescale_factor, postscale_factor)
    return begin_allreduce("grouped_allreduce", tensors, name, how, process_set, in_place=True)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce a tensor over the ranks of a set, and to give each rank its rows of the result.

    The rows are divided evenly along the first dimension; the first ranks get the remaining rows. The operator is
    not Adasum. For the other arguments, see allreduce_async.
    """
    how = How(op, None, prescale_factor, postscale_factor)
    return begin_reducescatter("reducescatter", [tensor], name, how, process_set)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to do what reducescatter_async does with several tensors, as one call. The result is a list."""
    how = How(op, None, prescale_factor, postscale_factor)
    return begin_reducescatter("grouped_reducescatter", tensors, name, how, process_set)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to join the tensors of all ranks of a set along the first dimension, which may differ, in rank order."""
    return begin_allgather("allgather", [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to do what allgather_async does with several tensors, as one call. The result is a list."""
    return begin_allgather("grouped_allgather", tensors, name, process_set)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to send the tensor of `root_rank`, a rank of the job, to all ranks of a set. The result is a new tensor."""
    return begin_broadcast(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to replace a tensor by that of `root_rank`, a rank of the job. See broadcast_async."""
    return begin_broadcast(tensor, root_rank, name, process_set, in_place=True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to send each rank of a set its rows of a tensor.

    The result is a tensor with the rows for this rank, in the order of the senders, and the number of rows of each
    sender (int32, on the CPU, or on the device of `splits` if they are a tensor).

    Args:
        tensor: has at least one dimension; the first may differ from rank to rank.
        splits: whole numbers: the rows for each rank, in rank order. Default: the same for all.
        name, process_set: see allreduce_async.

    Raises:
        ValueError: the splits do not fit the tensor, or are not whole numbers.
    """
    return begin_alltoall(tensor, splits, name, process_set)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to add up a sparse tensor over the ranks of a set: every rank gets the indices and values of all.

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
