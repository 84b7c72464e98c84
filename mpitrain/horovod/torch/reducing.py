"""Calls that reduce tensors over ranks, and return a handle at once. Tensors may be on the host or on a GPU."""

from __future__ import annotations

import torch

from mpitrain.horovod import operations
from mpitrain.horovod.named_call import NamedCall
from mpitrain.horovod.named_channel import NamedChannel
from mpitrain.horovod.operators import Operator
from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.horovod.state import current
from mpitrain.horovod.torch.submission import CallOutputs, Handle, Tensors, empty, part_of_call, submit
from mpitrain.torch.flat_tensors import FlatTensors, values

Average = Operator.Average


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
    return _allreduce(
        "allreduce", [tensor], name, operator_of(op, average), prescale_factor, postscale_factor, process_set, False
    )


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
    return _allreduce(
        "allreduce", [tensor], name, operator_of(op, average), prescale_factor, postscale_factor, process_set, True
    )


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
    op = operator_of(op, average)
    return _allreduce(
        "grouped_allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set, False, is_list=True
    )


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
    op = operator_of(op, average)
    return _allreduce(
        "grouped_allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set, True, is_list=True
    )


def gradients_async_(
    tensors: Tensors, name: str, op: Operator, prescale: float, postscale: float, process_set: ProcessSet
) -> Handle:
    """Begin to replace gradients by those of all ranks, as one call. The result is a list."""
    # Within a node, ranks share the cores that compute, and nothing is gained by exchanging beside the backward pass.
    hurries = current().world.num_nodes > 1
    return _allreduce(
        "gradients", tensors, name, op, prescale, postscale, process_set, True, is_list=True, hurries=hurries
    )


def _allreduce(
    kind: str,
    tensors: Tensors,
    name: str | None,
    op: Operator,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool,
    is_list: bool = False,
    hurries: bool = True,
) -> Handle:
    def make(channel: NamedChannel, key: str) -> NamedCall:
        buffers = FlatTensors()
        outputs = list(tensors) if in_place else [empty(tensor.shape, tensor) for tensor in tensors]
        parts = []
        for tensor, output in zip(tensors, outputs, strict=True):
            flat = buffers.write(output, filled=in_place)
            if not in_place:
                flat.view(tensor.shape).copy_(tensor.detach())
            parts.append(part_of_call(values(flat), tensor))
        call = operations.allreduce(channel, key, parts, op, prescale, postscale)
        call.buffers = buffers
        call.output = outputs if is_list else outputs[0]
        return call

    return submit(kind, tensors, name, process_set, make, hurries=hurries)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce a tensor over the ranks of a set, and to give each rank its rows of the result.

    The rows are divided evenly along the first dimension; the first ranks get those that are left over. The operator is
    not Adasum. For the other arguments, see allreduce_async.
    """
    return _reducescatter("reducescatter", [tensor], name, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to do what reducescatter_async does with several tensors, as one call. The result is a list."""
    kind = "grouped_reducescatter"
    return _reducescatter(kind, tensors, name, op, process_set, prescale_factor, postscale_factor, is_list=True)


def _reducescatter(
    kind: str,
    tensors: Tensors,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    is_list: bool = False,
) -> Handle:
    def make(channel: NamedChannel, key: str) -> NamedCall:
        outputs = CallOutputs(tensors, is_list)
        parts = [outputs.read(tensor) for tensor in tensors]
        how = Operator(op)
        return outputs.of(operations.reducescatter(channel, key, parts, how, prescale, postscale, outputs.make))

    return submit(kind, tensors, name, process_set, make)


def operator_of(op: int | None, average: bool | None) -> Operator:
    """Return the operator of a call. `average` is Horovod's old way to name it."""
    if average is not None and op is not None:
        raise ValueError(f"{current().world.name()}: both op and average are given; give op alone")
    if op is None:
        return Operator.Sum if average is False else Average
    return Operator(op)
