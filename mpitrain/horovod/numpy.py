"""Horovod's calls on NumPy arrays: `import mpitrain.horovod.numpy as hvd`. See docs/horovod.md.

The calls are those of mpitrain.horovod.torch, with the same arguments. They need PyTorch, whose tensors share the
memory of the arrays. A call takes an array, a number, or a list of arrays if it is grouped, and gives new arrays. A
call whose name ends with `_` replaces the values of its arrays. `synchronize` gives the result of a handle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from mpitrain.horovod.names import part_or_refusal
from mpitrain.horovod.state import current
from mpitrain.horovod.torch import (
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    moving,
    poll,
    rank,
    reducing,
    remove_process_set,
    shutdown,
    size,
    submission,
)
from mpitrain.horovod.torch.submission import Handle

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "synchronize",
]


def synchronize(handle: Handle) -> Any:
    """Wait for a call, and return its result: an array, a list of arrays, or a pair of arrays of alltoall.

    Raises:
        HorovodInternalError: the call has failed: the ranks differ, or one of them is gone.
    """
    return _arrays(submission.synchronize(handle))


def broadcast_parameters(params: Mapping[str, numpy.ndarray], root_rank: int) -> None:
    """Replace the values of arrays by those of `root_rank`. All ranks of the job call this.

    Args:
        params: arrays by name; the same names, shapes and dtypes on all ranks. They are overwritten.
        root_rank: the rank whose values are sent.

    Raises:
        HorovodInternalError: the ranks' arrays differ in shape or dtype.
    """
    handles = [broadcast_async_(array, root_rank, f"parameter.{name}") for name, array in sorted(params.items())]
    for handle in handles:
        synchronize(handle)


def _tensors(given: Any, in_place: bool) -> Any:
    """The tensor, or list of tensors, with the values of the arrays; `in_place`: in the same memory."""
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return [_tensors(one, in_place) for one in given]
    array = given if in_place else numpy.asarray(given)
    problem = ""
    if not isinstance(array, numpy.ndarray):
        problem = f"a {type(array).__name__}, whose values cannot be replaced; give a NumPy array"
    elif in_place and not array.flags.writeable:
        problem = "an array that cannot be written to; give a copy of it, or use the call without _"
    if not problem:
        try:
            # PyTorch has no tensors with negative strides, and warns of memory that cannot be written to.
            return torch.from_numpy(array if in_place else numpy.array(array, order="C"))
        except (TypeError, ValueError) as error:
            problem = f"an array of {array.dtype} with strides {array.strides}: {error}"
    raise TypeError(f"{current().world.name()}: a call of Horovod's interface got {problem}")


def _arrays(result: Any) -> Any:
    """The result of a call, with arrays in place of its tensors."""
    if isinstance(result, list | tuple):
        return type(result)(_arrays(one) for one in result)
    return result.numpy()


def _begins(call: Callable[..., Handle]) -> Callable[..., Handle]:
    """The call on arrays that begins as this one on tensors."""
    in_place = call.__name__.endswith("_")

    @functools.wraps(call)
    def begin(arrays: Any, *arguments: Any, **options: Any) -> Handle:
        return call(_tensors(arrays, in_place), *arguments, **options)

    return begin


def _waits(begin: Callable[..., Handle]) -> Callable[..., Any]:
    """The call on arrays that also waits for its result. One in place returns the arrays that it was given."""
    in_place = begin.__name__.endswith("_")

    @functools.wraps(begin)
    def call(arrays: Any, *arguments: Any, **options: Any) -> Any:
        result = synchronize(begin(arrays, *arguments, **options))
        return arrays if in_place else result

    return call


allreduce_async = _begins(reducing.allreduce_async)
allreduce_async_ = _begins(reducing.allreduce_async_)
grouped_allreduce_async = _begins(reducing.grouped_allreduce_async)
grouped_allreduce_async_ = _begins(reducing.grouped_allreduce_async_)
reducescatter_async = _begins(reducing.reducescatter_async)
grouped_reducescatter_async = _begins(reducing.grouped_reducescatter_async)
allgather_async = _begins(moving.allgather_async)
grouped_allgather_async = _begins(moving.grouped_allgather_async)
broadcast_async = _begins(moving.broadcast_async)
broadcast_async_ = _begins(moving.broadcast_async_)
alltoall_async = _begins(moving.alltoall_async)

allreduce, allreduce_ = _waits(allreduce_async), _waits(allreduce_async_)
grouped_allreduce, grouped_allreduce_ = _waits(grouped_allreduce_async), _waits(grouped_allreduce_async_)
reducescatter, grouped_reducescatter = _waits(reducescatter_async), _waits(grouped_reducescatter_async)
allgather, grouped_allgather = _waits(allgather_async), _waits(grouped_allgather_async)
broadcast, broadcast_ = _waits(broadcast_async), _waits(broadcast_async_)
alltoall = _waits(alltoall_async)


def __getattr__(name: str) -> Any:
    return part_or_refusal(__name__, name, {}, __all__)
