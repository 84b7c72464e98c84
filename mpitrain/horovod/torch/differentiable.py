"""Named calls on tensors that wait for their result. Gradients pass through those that return a new tensor.

The gradient of a call is also a call, so all ranks of the set must reach it. With a mean over ranks in the forward
pass, each rank's gradient is the mean of the ranks' gradients: the gradient of one process for the mean of the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpitrain.horovod.process_sets import ProcessSet, global_process_set, refused_by_all
from mpitrain.horovod.torch.calls import (
    Average,
    How,
    Sum,
    Tensors,
    begin_allgather,
    begin_allreduce,
    begin_alltoall,
    begin_broadcast,
    begin_reducescatter,
    check,
)
from mpitrain.horovod.torch.compression import Compression, Compressor

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]

# Computes the gradients of a call's tensors from those of its results.
Back = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class _Linked(torch.autograd.Function):
    """The results of a call that has ended, with the function that turns their gradients into those of its tensors."""

    @staticmethod
    def forward(ctx: Any, back: Back, results: list[torch.Tensor], *tensors: torch.Tensor) -> Any:
        ctx.back = back
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.back(gradients)


def _linked(tensors: Tensors, results: list[torch.Tensor], back: Back) -> list[torch.Tensor]:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Linked.apply(back, results, *tensors))  # type: ignore[no-untyped-call]
    return results


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
    """Return the tensor reduced over the ranks of a set. See allreduce_async; gradients pass through.

    Args:
        compression: Compression.none, Compression.fp16, or an object with the same methods.
    """
    how = How(op, average, prescale_factor, postscale_factor)
    return _allreduced("allreduce", [tensor], name, compression, how, process_set)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replace the tensor by the result of all ranks, and return it. See allreduce_async."""
    how = How(op, average, prescale_factor, postscale_factor)
    call = begin_allreduce("allreduce", [tensor], name, how, process_set, in_place=True, hurries=False)
    result: torch.Tensor = call.ended()
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
    how = How(op, average, prescale_factor, postscale_factor)
    return _allreduced("grouped_allreduce", tensors, name, compression, how, process_set)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Replace the tensors by the results of all ranks, and return them. See allreduce_async."""
    how = How(op, average, prescale_factor, postscale_factor)
    call = begin_allreduce("grouped_allreduce", tensors, name, how, process_set, in_place=True, hurries=False)
    results: list[torch.Tensor] = call.ended()
    return results


def _allreduced(
    kind: str, tensors: Tensors, name: str | None, compression: Compressor, how: How, process_set: ProcessSet
) -> list[torch.Tensor]:
    shorter, contexts = _compressed(kind, tensors, name, compression, process_set)
    call = begin_allreduce(kind, shorter, name, how, process_set, hurries=False)
    results = _linked(shorter, _listed(call.ended()), lambda slopes: _reduced(slopes, how, process_set))
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def _reduced(gradients: Sequence[torch.Tensor], how: How, process_set: ProcessSet) -> list[torch.Tensor]:
    call = begin_allreduce("grouped_allreduce", gradients, None, how, process_set, hurries=False)
    results: list[torch.Tensor] = call.ended()
    return results


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor. See reducescatter_async; gradients pass through."""
    how = How(op, None, prescale_factor, postscale_factor)
    return _scattered("reducescatter", [tensor], name, compression, how, process_set)[0]


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
    how = How(op, None, prescale_factor, postscale_factor)
    return _scattered("grouped_reducescatter", tensors, name, compression, how, process_set)


def _scattered(
    kind: str, tensors: Tensors, name: str | None, compression: Compressor, how: How, process_set: ProcessSet
) -> list[torch.Tensor]:
    shorter, contexts = _compressed(kind, tensors, name, compression, process_set)
    call = begin_reducescatter(kind, shorter, name, how, process_set, hurries=False)

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        op, _, pre, post = how.checked()
        factor = pre * post * (len(process_set.ranks) if op is Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        whole: list[torch.Tensor] = begin_allgather(
            "grouped_allgather", scaled, None, process_set, hurries=False
        ).ended()
        return whole

    results = _linked(shorter, _listed(call.ended()), back)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks of a set, joined along the first dimension. Gradients pass through."""
    return _gathered("allgather", [tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Return what allgather returns, for several tensors as one call."""
    return tuple(_gathered("grouped_allgather", tensors, name, process_set))


def _gathered(kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[torch.Tensor]:
    with refused_by_all(kind, name, process_set):
        tensors = list(tensors)
    call = begin_allgather(kind, tensors, name, process_set, hurries=False)
    results = _listed(call.ended())
    details, here = call.details, call.channel.world.rank  # without the call, which has the results

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        means = _reduced(gradients, How(Average), process_set)
        lengths = [[detail[place] for detail in details] for place in range(len(means))]
        parts = zip(means, lengths, strict=True)
        return [mean.narrow(0, sum(of_ranks[:here]), of_ranks[here]) for mean, of_ranks in parts]

    return _linked(tensors, results, back)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of `root_rank`, a rank of the job, on all ranks of a set. Gradients pass through."""
    call = begin_broadcast(tensor, root_rank, name, process_set, hurries=False)

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (mean,) = _reduced(gradients, How(Average), process_set)
        return [mean if process_set.rank() == process_set.ranks.index(root_rank) else torch.zeros_like(mean)]

    return _linked([tensor], [call.ended()], back)[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace the tensor by that of `root_rank`, a rank of the job, and return it."""
    call = begin_broadcast(tensor, root_rank, name, process_set, in_place=True, hurries=False)
    result: torch.Tensor = call.ended()
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows for this rank; with `splits` also their number from each rank. See alltoall_async."""
    result, received = begin_alltoall(tensor, splits, name, process_set, hurries=False).ended()

    def back(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [begin_alltoall(gradients[0], received, None, process_set, hurries=False).ended()[0]]

    (output,) = _linked([tensor], [result], back)
    return output if splits is None else (output, received)


def _compressed(
    kind: str, tensors: Tensors, name: str | None, compression: Compressor, process_set: ProcessSet
) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """The tensors to send, and what `decompress` needs for each."""
    with refused_by_all(kind, name, process_set):
        tensors = list(tensors)  # it may be any iterable, such as a generator
        check(tensors)
        shorter, contexts = zip(*map(compression.compress, tensors), strict=True)
    return shorter, contexts


def _listed(result: Any) -> list[torch.Tensor]:
    """The results of a call for one tensor or for several."""
    return result if isinstance(result, list) else [result]
