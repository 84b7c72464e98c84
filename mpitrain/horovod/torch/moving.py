"""Calls that move tensors between ranks, and return a handle at once. Tensors may be on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.horovod import operations
from mpitrain.horovod.named_call import NamedCall
from mpitrain.horovod.named_channel import NamedChannel
from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.horovod.torch.submission import CallOutputs, Handle, Tensors, empty, part_of_call, submit
from mpitrain.torch.flat_tensors import FlatTensors, raw


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to join the tensors of all ranks of a set along the first dimension, which may differ, in rank order."""
    return gather("allgather", [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to do what allgather_async does with several tensors, as one call. The result is a list."""
    return gather("grouped_allgather", tensors, name, process_set, is_list=True)


def gather(kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet, is_list: bool = False) -> Handle:
    """Begin an allgather of this kind; the result is a list or the only tensor. See allgather_async."""

    def make(channel: NamedChannel, key: str) -> NamedCall:
        outputs = CallOutputs(tensors, is_list)
        parts = [outputs.read(tensor) for tensor in tensors]
        return outputs.of(operations.allgather(channel, key, parts, outputs.make))

    return submit(kind, tensors, name, process_set, make)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to send the tensor of `root_rank`, a rank of the job, to all ranks of a set. The result is a new tensor."""
    return _broadcast(tensor, empty(tensor.shape, tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to replace a tensor by that of `root_rank`, a rank of the job. See broadcast_async."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def _broadcast(
    tensor: torch.Tensor, output: torch.Tensor, root: int, name: str | None, process_set: ProcessSet
) -> Handle:
    def make(channel: NamedChannel, key: str) -> NamedCall:
        if root not in process_set.ranks:
            raise ValueError(f"root_rank={root}; the process set has the ranks {process_set.ranks}")
        buffers = FlatTensors()
        is_root = process_set.rank() == process_set.ranks.index(root)
        flat = buffers.write(output, filled=is_root and output is tensor)
        if is_root and output is not tensor:
            flat.view(tensor.shape).copy_(tensor.detach())
        call = operations.broadcast(channel, key, part_of_call(raw(flat), tensor), process_set.ranks.index(root))
        call.buffers, call.output = buffers, output
        return call

    return submit("broadcast", [tensor], name, process_set, make)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to send each rank of a set its rows of a tensor.

    The result is a tensor with the rows for this rank, in the order of the senders, and the number of rows of each
    sender (int32, on the host; where `splits` are, if they are a tensor).

    Args:
        tensor: has at least one dimension; the first may differ from rank to rank.
        splits: whole numbers: the rows for each rank, in rank order. Default: the same for all.
        name, process_set: see allreduce_async.

    Raises:
        ValueError: the splits do not fit the tensor, or are no whole numbers.
    """

    def make(channel: NamedChannel, key: str) -> NamedCall:
        outputs = CallOutputs([tensor], False)
        numbers = torch.as_tensor(splits if splits is not None else [])
        if splits is not None and len(numbers) and (numbers.is_floating_point() or numbers.is_complex()):
            raise ValueError(f"splits of {numbers.dtype}; give whole numbers, such as torch.int32")
        rows = None if splits is None else [int(number) for number in numbers.tolist()]
        call = outputs.of(operations.alltoall(channel, key, outputs.read(tensor), rows, outputs.make))
        like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
        call.finish = lambda: (outputs.tensors[0], torch.tensor(call.output, dtype=like.dtype, device=like.device))
        return call

    return submit("alltoall", [tensor], name, process_set, make)
