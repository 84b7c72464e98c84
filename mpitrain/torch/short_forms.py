"""The second form of ProcessGroup's calls in PyTorch: one tensor instead of a list, and no options object.

    group.allreduce(x, dist.ReduceOp.MAX).wait()
    group.broadcast(x, root=1, timeout=timedelta(seconds=9)).wait()

Each function below takes the arguments of PyTorch's short form, and returns those of the long form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from mpitrain.torch.uncompiled import uncompiled

Arguments: TypeAlias = tuple[Any, ...]
_SUM = dist.ReduceOp.SUM


def _options(kind: Any, timeout: timedelta | None, **fields: Any) -> Any:
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    if timeout is not None:
        options.timeout = timeout
    return options


def _broadcast(tensor: torch.Tensor, root: int, timeout: timedelta | None = None) -> Arguments:
    return [tensor], _options(_c10d.BroadcastOptions, timeout, rootRank=root)


def _allreduce(tensors: Any, op: Any = _SUM, timeout: timedelta | None = None) -> Arguments:
    """This form also takes a list."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return listed, _options(_c10d.AllreduceOptions, timeout, reduceOp=op)


def _reduce(tensor: torch.Tensor, root: int, op: Any = _SUM, timeout: timedelta | None = None) -> Arguments:
    return [tensor], _options(_c10d.ReduceOptions, timeout, rootRank=root, reduceOp=op)


def _allgather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta | None = None) -> Arguments:
    return [outputs], [tensor], _options(_c10d.AllgatherOptions, timeout)


def _gather(
    outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int, timeout: timedelta | None = None
) -> Arguments:
    return [outputs], [tensor], _options(_c10d.GatherOptions, timeout, rootRank=root)


def _scatter(
    output: torch.Tensor, tensors: Sequence[torch.Tensor], root: int, timeout: timedelta | None = None
) -> Arguments:
    return [output], [tensors], _options(_c10d.ScatterOptions, timeout, rootRank=root)


def _reduce_scatter(
    output: torch.Tensor, tensors: Sequence[torch.Tensor], op: Any = _SUM, timeout: timedelta | None = None
) -> Arguments:
    return [output], [tensors], _options(_c10d.ReduceScatterOptions, timeout, reduceOp=op)


def _all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    timeout: timedelta | None = None,
) -> Arguments:
    return output, tensor, output_split_sizes, input_split_sizes, _options(_c10d.AllToAllOptions, timeout)


def _barrier(timeout: timedelta | None = None) -> Arguments:
    return (_options(_c10d.BarrierOptions, timeout),)


# The short form of each call, and the number of its arguments that are lists in the long form.
_FORMS: dict[str, tuple[Callable[..., Arguments], int]] = {
    "broadcast": (_broadcast, 1),
    "allreduce": (_allreduce, 1),
    "reduce": (_reduce, 1),
    "allgather": (_allgather, 2),
    "gather": (_gather, 2),
    "scatter": (_scatter, 2),
    "reduce_scatter": (_reduce_scatter, 2),
    "all_to_all_single": (_all_to_all_single, 0),
    "barrier": (_barrier, 0),
}


def with_short_forms(kind: Any) -> Any:
    """Decorate a class of process groups so that its calls have both forms."""
    for name, (long_form, num_lists) in _FORMS.items():
        setattr(kind, name, _both(getattr(kind, name), long_form, num_lists))
    return kind


def _both(method: Callable[..., Any], long_form: Callable[..., Arguments], num_lists: int) -> Callable[..., Any]:
    @functools.wraps(method)
    @uncompiled  # while it has no __wrapped__: torch's C++ calls it too
    def call(self: Any, *args: Any, **named: Any) -> Any:
        is_short = (
            any(isinstance(one, torch.Tensor) for one in args[:num_lists])
            or any(isinstance(one, timedelta | dist.ReduceOp | dist.ReduceOp.RedOpType) for one in args[num_lists:])
            or not named.keys().isdisjoint(("root", "op", "timeout"))
        )
        return method(self, *long_form(*args, **named)) if is_short else method(self, *args, **named)

    return call
