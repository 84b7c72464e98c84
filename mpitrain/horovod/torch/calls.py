"""Named calls on tensors that return a handle at once. Tensors may be on the host or on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from mpitrain.horovod import operations, waits
from mpitrain.horovod.exceptions import HorovodInternalError
from mpitrain.horovod.named_call import NamedCall
from mpitrain.horovod.named_channel import NamedChannel
from mpitrain.horovod.operations import Part
from mpitrain.horovod.operators import Operator
from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.horovod.state import channel_of, current
from mpitrain.torch import checks
from mpitrain.torch.flat_tensors import FlatTensors, raw, values

Average = Operator.Average
Handle = NamedCall
Tensors = Sequence[torch.Tensor]
# Whether this thread will wait at once for the call that it begins. Then it drives the call itself, and the engine's
# thread would only be in its way.
_thread = threading.local()


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
        outputs = list(tensors) if in_place else [_empty(tensor.shape, tensor) for tensor in tensors]
        parts = []
        for tensor, output in zip(tensors, outputs, strict=True):
            flat = buffers.write(output, filled=in_place)
            if not in_place:
                flat.view(tensor.shape).copy_(tensor.detach())
            parts.append(_part(values(flat), tensor))
        call = operations.allreduce(channel, key, parts, op, prescale, postscale)
        call.buffers = buffers
        call.output = outputs if is_list else outputs[0]
        return call

    return _submit(kind, tensors, name, process_set, make, hurries=hurries)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to join the tensors of all ranks of a set along the first dimension, which may differ, in rank order."""
    return _allgather("allgather", [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to do what allgather_async does with several tensors, as one call. The result is a list."""
    return _allgather("grouped_allgather", tensors, name, process_set, is_list=True)


def _allgather(kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet, is_list: bool = False) -> Handle:
    def make(channel: NamedChannel, key: str) -> NamedCall:
        outputs = _Outputs(tensors, is_list)
        parts = [outputs.read(tensor) for tensor in tensors]
        return outputs.of(operations.allgather(channel, key, parts, outputs.make))

    return _submit(kind, tensors, name, process_set, make)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to send the tensor of `root_rank`, a rank of the job, to all ranks of a set. The result is a new tensor."""
    return _broadcast(tensor, _empty(tensor.shape, tensor), root_rank, name, process_set)


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
        call = operations.broadcast(channel, key, _part(raw(flat), tensor), process_set.ranks.index(root))
        call.buffers, call.output = buffers, output
        return call

    return _submit("broadcast", [tensor], name, process_set, make)


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
        outputs = _Outputs([tensor], False)
        numbers = torch.as_tensor(splits if splits is not None else [])
        if splits is not None and len(numbers) and (numbers.is_floating_point() or numbers.is_complex()):
            raise ValueError(f"splits of {numbers.dtype}; give whole numbers, such as torch.int32")
        rows = None if splits is None else [int(number) for number in numbers.tolist()]
        call = outputs.of(operations.alltoall(channel, key, outputs.read(tensor), rows, outputs.make))
        like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)
        call.finish = lambda: (outputs.tensors[0], torch.tensor(call.output, dtype=like.dtype, device=like.device))
        return call

    return _submit("alltoall", [tensor], name, process_set, make)


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
        outputs = _Outputs(tensors, is_list)
        parts = [outputs.read(tensor) for tensor in tensors]
        how = Operator(op)
        return outputs.of(operations.reducescatter(channel, key, parts, how, prescale, postscale, outputs.make))

    return _submit(kind, tensors, name, process_set, make)


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's scripts give it
    """Say that this rank has no more data. It contributes zeros to the allreduces of the others until all have joined.

    Args:
        device: ignored; a rank that has joined works on the host.

    Returns:
        The rank that joined last.
    """
    channel = channel_of(global_process_set)
    return int(waits.ended(channel.submit(operations.join(channel), hurries=False)))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a set have made this call."""
    channel = channel_of(process_set)
    waits.ended(channel.submit(operations.barrier(channel, channel.key("barrier", None)), hurries=False))


def poll(handle: Handle) -> bool:
    """Return whether a call has ended, so that synchronize() returns at once."""
    return waits.is_ended(handle)


def synchronize(handle: Handle) -> Any:
    """Wait for a call, and return its result: a tensor, a list of tensors, or a pair of tensors of alltoall.

    Raises:
        HorovodInternalError: the call has failed: the ranks differ, or one of them is gone.
    """
    output = waits.ended(handle)
    return output if handle.finish is None else handle.finish()


def now(begin: Callable[..., Handle], *arguments: Any) -> Any:
    """Make a call that returns a handle, wait for it, and return its result. Errors are those of both."""
    _thread.waits = True
    try:
        handle = begin(*arguments)
    finally:
        _thread.waits = False
    return synchronize(handle)


class _Outputs:
    """The results of a call, which are made when their lengths are known, and what the call reads."""

    def __init__(self, inputs: Tensors, is_list: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self._inputs = inputs
        self._is_list = is_list
        self._buffers = FlatTensors()

    def read(self, tensor: torch.Tensor) -> Part:
        """Return the part that the call reads."""
        return _part(values(self._buffers.read(tensor)), tensor)

    def make(self, place: int, shape: tuple[int, ...]) -> numpy.ndarray:
        """See operations.Make."""
        self.tensors.append(_empty(shape, self._inputs[place]))
        return raw(self._buffers.write(self.tensors[-1]))

    def of(self, call: NamedCall) -> NamedCall:
        """Make these the outputs of a call."""
        call.buffers = self._buffers
        call.finish = lambda: self.tensors if self._is_list else self.tensors[0]
        return call


def _submit(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    make: Callable[[NamedChannel, str], NamedCall],
    *,
    hurries: bool = True,
) -> Handle:
    channel = channel_of(process_set)
    key = channel.key(kind, name)
    try:
        checks.tensors(tensors, dtypes=False)
        call = make(channel, key)
    except (TypeError, ValueError, HorovodInternalError) as error:
        channel.refuse(key, type(error)(f"{channel.world.name()}: {key}: {error}"))
    return channel.submit(call, hurries=hurries and not getattr(_thread, "waits", False))


def operator_of(op: int | None, average: bool | None) -> Operator:
    """Return the operator of a call. `average` is Horovod's old way to name it."""
    if average is not None and op is not None:
        raise ValueError(f"{current().world.name()}: both op and average are given; give op alone")
    if op is None:
        return Operator.Sum if average is False else Average
    return Operator(op)


def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def _part(flat: numpy.ndarray, tensor: torch.Tensor) -> Part:
    return Part(flat, tuple(tensor.shape), checks.kind(tensor))
