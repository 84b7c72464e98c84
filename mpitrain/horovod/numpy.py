"""Horovod's calls on NumPy arrays: `import mpitrain.horovod.numpy as hvd`. See docs/how-to/horovod.md.

The calls are those of mpitrain.horovod.torch, with the same arguments. They need PyTorch, whose tensors share the
memory of the arrays. A call takes an array, a number, or a list of arrays if it is grouped, and returns new arrays. A
call whose name ends with `_` replaces the values of its arrays. `synchronize` returns the result of a handle.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from mpitrain.errors import HorovodInternalError
from mpitrain.horovod import basics, process_sets
from mpitrain.horovod.basics import *  # noqa: F403
from mpitrain.horovod.named_call import Operator
from mpitrain.horovod.names import part_or_refusal
from mpitrain.horovod.process_sets import *  # noqa: F403
from mpitrain.horovod.process_sets import ProcessSet, global_process_set, refused_by_all
from mpitrain.horovod.torch import asynchronous
from mpitrain.horovod.torch.asynchronous import Adasum, Average, Max, Min, Product, Sum, poll
from mpitrain.horovod.torch.calls import Handle, operator_of
from mpitrain.horovod.torch.objects import allgather_object, broadcast_object

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]
__all__ += basics.__all__
__all__ += process_sets.__all__


def synchronize(handle: Handle) -> Any:
    """Wait for a call, and return its result: an array, a list of arrays, or a pair of arrays of alltoall.

    Raises:
        HorovodInternalError: the call has failed: the ranks differ, or one of them is gone.
    """
    return _arrays(handle.ended())


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
    if isinstance(given, numpy.ndarray) and type(given) not in (numpy.ndarray, numpy.memmap):
        problem = f"a {type(given).__name__}, of which only the values would be sent; give numpy.asarray(x)"
    elif not isinstance(array, numpy.ndarray):
        problem = f"a {type(array).__name__}, whose values cannot be replaced; give a NumPy array"
    elif in_place and not array.flags.writeable:
        problem = "an array that cannot be written to; give a copy of it, or use the call without _"
    if not problem:
        try:
            # PyTorch has no tensors with negative strides, and warns of memory that cannot be written to.
            return torch.from_numpy(array if in_place else numpy.array(array, order="C"))
        except (TypeError, ValueError) as error:
            problem = f"an array of {array.dtype} with strides {array.strides}: {error}"
    raise TypeError(problem)


def _arrays(result: Any) -> Any:
    """The result of a call, with arrays in place of its tensors."""
    if isinstance(result, list | tuple):
        return type(result)(_arrays(one) for one in result)
    return result.numpy()


def _check_fits(given: Any, op: Operator, process_set: ProcessSet) -> None:
    """Raise ValueError if sums of these integers might not fit into 64 bits: they would wrap around without an error.

    Arrays are not checked. As everywhere, their sums wrap around.
    """
    if op not in (Operator.Average, Operator.Sum):
        return
    size = process_set.size() or 1
    for number in given if isinstance(given, list | tuple) else [given]:
        if isinstance(number, int | numpy.int64) and abs(int(number)) > numpy.iinfo(numpy.int64).max // size:
            raise ValueError(
                f"the sum of the integer {number} over {size} ranks may not fit into int64; give a float, or add "
                "Python's integers, which have no limit: sum(hvd.allgather_object(n))"
            )


def _begins(call: Callable[..., Handle]) -> Callable[..., Handle]:
    """Return the call on arrays that begins as this call on tensors does."""
    in_place = call.__name__.endswith("_")
    kind = call.__name__.removesuffix("_").removesuffix("_async")
    parameters = list(inspect.signature(call).parameters)[1:]

    @functools.wraps(call)
    def begin(arrays: Any, *arguments: Any, **options: Any) -> Handle:
        given = dict(zip(parameters, arguments, strict=False)) | options
        with refused_by_all(kind, given.get("name"), given.get("process_set", global_process_set)):
            if kind.endswith("allreduce"):
                whole = given.get("op"), given.get("average")
                _check_fits(arrays, operator_of(*whole), given.get("process_set", global_process_set))
            tensors = _tensors(arrays, in_place)
        return call(tensors, *arguments, **options)

    return begin


def _waits(begin: Callable[..., Handle]) -> Callable[..., Any]:
    """Return the call on arrays that also waits for its result. An in-place call returns the arrays that it was
    given."""
    in_place = begin.__name__.endswith("_")

    @functools.wraps(begin)
    def call(arrays: Any, *arguments: Any, **options: Any) -> Any:
        result = synchronize(begin(arrays, *arguments, **options))
        return arrays if in_place else result

    return call


allreduce_async = _begins(asynchronous.allreduce_async)
allreduce_async_ = _begins(asynchronous.allreduce_async_)
grouped_allreduce_async = _begins(asynchronous.grouped_allreduce_async)
grouped_allreduce_async_ = _begins(asynchronous.grouped_allreduce_async_)
reducescatter_async = _begins(asynchronous.reducescatter_async)
grouped_reducescatter_async = _begins(asynchronous.grouped_reducescatter_async)
allgather_async = _begins(asynchronous.allgather_async)
grouped_allgather_async = _begins(asynchronous.grouped_allgather_async)
broadcast_async = _begins(asynchronous.broadcast_async)
broadcast_async_ = _begins(asynchronous.broadcast_async_)
alltoall_async = _begins(asynchronous.alltoall_async)

allreduce, allreduce_ = _waits(allreduce_async), _waits(allreduce_async_)
grouped_allreduce, grouped_allreduce_ = _waits(grouped_allreduce_async), _waits(grouped_allreduce_async_)
reducescatter, grouped_reducescatter = _waits(reducescatter_async), _waits(grouped_reducescatter_async)
allgather, grouped_allgather = _waits(allgather_async), _waits(grouped_allgather_async)
broadcast, broadcast_ = _waits(broadcast_async), _waits(broadcast_async_)
alltoall = _waits(alltoall_async)


def __getattr__(name: str) -> Any:
    return part_or_refusal(__name__, name, {}, __all__)
