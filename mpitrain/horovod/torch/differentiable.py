"""Named calls on tensors that wait for their result. Gradients pass through those that return a new tensor.

The gradient of a call is a call too, so all ranks of the set have to come to it. With a mean over ranks in the forward
pass, each rank's gradient is the mean of the ranks' gradients: what one process would get for the mean of the losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpitrain.horovod.operators import Operator
from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.horovod.torch import moving, reducing
from mpitrain.horovod.torch.compression import Compression, Compressor
from mpitrain.horovod.torch.reducing import Average
from mpitrain.horovod.torch.submission import Tensors, now

# mypy: disable-error-code="no-untyped-call,no-untyped-def,override,misc"
# torch.autograd.Function has no types for what is defined here.


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, factors: tuple[float, float], process_set: Any, *tensors: Any) -> Any:
        ctx.how = op, factors, process_set
        pre, post = factors
        if len(tensors) == 1 and not isinstance(name, _OfGroup):
            return now(reducing.allreduce_async, tensors[0], None, name, op, pre, post, process_set)
        return tuple(now(reducing.grouped_allreduce_async, list(tensors), None, name.name, op, pre, post, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, factors, process_set = ctx.how
        return (None, None, None, None, *_reduced(gradients, op, factors, process_set))


class _OfGroup:
    """Marks the name of a call with a list of tensors."""

    def __init__(self, name: str | None) -> None:
        self.name = name


def _reduced(gradients: Sequence[torch.Tensor], op: Any, factors: tuple[float, float], process_set: Any) -> Any:
    pre, post = factors
    return now(reducing.grouped_allreduce_async, list(gradients), None, None, op, pre, post, process_set)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor reduced over the ranks of a set. See reducing.allreduce_async; gradients pass through.

    Args:
        compression: Compression.none, Compression.fp16, or an object with the same methods.
    """
    how = reducing.operator_of(op, average)
    short, context = compression.compress(tensor)
    result = _Allreduce.apply(name, how, (prescale_factor, postscale_factor), process_set, short)
    return compression.decompress(result, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replace the tensor by the result of all ranks, and return it. See reducing.allreduce_async."""
    result: torch.Tensor = now(
        reducing.allreduce_async_, tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the tensors reduced over the ranks of a set, as one call. See allreduce."""
    how = reducing.operator_of(op, average)
    short, contexts = zip(*map(compression.compress, tensors), strict=True)
    results = _Allreduce.apply(_OfGroup(name), how, (prescale_factor, postscale_factor), process_set, *short)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Replace the tensors by the results of all ranks, and return them. See reducing.allreduce_async."""
    results: list[torch.Tensor] = now(
        reducing.grouped_allreduce_async_, tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return results


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Any) -> Any:
        ctx.process_set, ctx.lengths = process_set, [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        if len(tensors) == 1 and not isinstance(name, _OfGroup):
            return now(moving.allgather_async, tensors[0], name, process_set)
        return tuple(now(moving.grouped_allgather_async, list(tensors), name.name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        means = _reduced(gradients, Average, (1.0, 1.0), ctx.process_set)
        lengths = torch.tensor([ctx.lengths])
        of_all = now(moving.allgather_async, lengths, None, ctx.process_set)
        begins = of_all[: ctx.process_set.rank()].sum(0).tolist()
        parts = zip(means, begins, ctx.lengths, strict=True)
        return (None, None, *(mean.narrow(0, begin, length) for mean, begin, length in parts))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks of a set, joined along the first dimension. Gradients pass through."""
    result: torch.Tensor = _Allgather.apply(name, process_set, tensor)
    return result


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Return what allgather returns, for several tensors as one call."""
    results: tuple[torch.Tensor, ...] = _Allgather.apply(_OfGroup(name), process_set, *tensors)
    return results


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, root: Any, name: Any, process_set: Any) -> Any:
        ctx.how = root, process_set
        return now(moving.broadcast_async, tensor, root, name, process_set)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        root, process_set = ctx.how
        (mean,) = _reduced([gradient], Average, (1.0, 1.0), process_set)
        is_root = process_set.rank() == process_set.ranks.index(root)
        return mean if is_root else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of `root_rank`, a rank of the job, on all ranks of a set. Gradients pass through."""
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace the tensor by that of `root_rank`, a rank of the job, and return it."""
    result: torch.Tensor = now(moving.broadcast_async_, tensor, root_rank, name, process_set)
    return result


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: Any) -> Any:
        output, received = now(moving.alltoall_async, tensor, splits, name, process_set)
        ctx.how = received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        received, process_set = ctx.how
        return now(moving.alltoall_async, gradient, received, None, process_set)[0], None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows for this rank; with `splits` also their number from each rank. See moving.alltoall_async."""
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, factors: tuple[float, float], process_set: Any, *tensors: Any) -> Any:
        ctx.how = op, factors, process_set
        if len(tensors) == 1 and not isinstance(name, _OfGroup):
            return now(reducing.reducescatter_async, tensors[0], name, op, process_set, *factors)
        return tuple(now(reducing.grouped_reducescatter_async, list(tensors), name.name, op, process_set, *factors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, (pre, post), process_set = ctx.how
        factor = pre * post * (process_set.size() if op == Operator.Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        return (None, None, None, None, *now(moving.grouped_allgather_async, scaled, None, process_set))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor. See reducing.reducescatter_async; gradients pass through."""
    short, context = compression.compress(tensor)
    result = _Reducescatter.apply(name, op, (prescale_factor, postscale_factor), process_set, short)
    return compression.decompress(result, context)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return what reducescatter returns, for several tensors as one call."""
    short, contexts = zip(*map(compression.compress, tensors), strict=True)
    results = _Reducescatter.apply(_OfGroup(name), op, (prescale_factor, postscale_factor), process_set, *short)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]
