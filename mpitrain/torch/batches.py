"""Batches of any structure: their tensors and arrays, and the same structure with other tensors and arrays.

Also the descriptions by which the ranks compare batches, and data sets before the first batch.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from mpitrain.adapters.torch_arrays import array_of
from mpitrain.collectives.trees import aligned_copy

_EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def children_of(value: Any) -> dict[Any, Any] | None:
    """Return the entries of a mapping, a dataclass, a list or a tuple by key; None: `value` is not a container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, PackedSequence):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size | PackedSequence):
        return dict(enumerate(value))
    return None


def rebuilt(value: Any, children: Mapping[Any, Any]) -> Any:
    """Return a new container of the class of `value` with these entries, under the same keys. `value` is not
    changed."""
    kind: Any = type(value)
    if isinstance(value, dict | UserDict):
        result: Any = copy.copy(value)  # keeps other attributes of a library's dict
        for key, child in children.items():  # not update(): a Counter would add
            result[key] = child
        return result
    if isinstance(value, Mapping):
        return kind(dict(children))
    if hasattr(value, "_fields"):
        return kind._make(children.values())
    if dataclasses.is_dataclass(value):
        result = copy.copy(value)
        for key, child in children.items():
            object.__setattr__(result, key, child)  # also works if the dataclass is frozen
        return result
    return kind(children.values())


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same structure with `function` applied to everything that is not a container."""
    children = children_of(value)
    if children is None:
        return function(value)
    return rebuilt(value, {key: mapped(child, function) for key, child in children.items()})


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything in a structure that is not a container."""
    children = children_of(value)
    if children is None:
        yield value
    else:
        for child in children.values():
            yield from leaves(child)


def has_rows(leaf: Any) -> bool:
    """Whether a leaf is a tensor or array with rows that can be cut out."""
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim > 0 and leaf.layout == torch.strided and not leaf.is_nested
    return isinstance(leaf, numpy.ndarray) and leaf.ndim > 0


def arrays_of(batch: Any) -> list[numpy.ndarray]:
    """Return the tensors and arrays of a batch that have rows, on the CPU."""
    rows = filter(has_rows, leaves(batch))
    return [array_of(leaf.cpu()) if isinstance(leaf, torch.Tensor) else leaf for leaf in rows]


def copied(batch: Any) -> Any:
    """Return a batch with tensors and arrays copied to new memory, aligned to 64 bytes."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone(memory_format=torch.contiguous_format) if leaf.layout == torch.strided else leaf.clone()
        return aligned_copy(leaf) if isinstance(leaf, numpy.ndarray) else leaf

    return mapped(batch, one)


def checksum(columns: Sequence[Any]) -> int:
    """Return a checksum of the first and the last entry of each column."""
    result = 0
    for column in columns:
        for entry in (column[0], column[-1]) if len(column) else ():
            result = checksum_of_sample(entry, result)
    return result


def checksum_of_sample(sample: Any, before: int = 0) -> int:
    """Return a checksum of the first tensor, array, number or text of a sample. Other objects change nothing."""
    for leaf in leaves(sample):
        if isinstance(leaf, str | bytes | bool | int | float | complex):
            return zlib.crc32(leaf if isinstance(leaf, bytes) else str(leaf).encode("utf-8", "surrogatepass"), before)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
            return zlib.crc32(numpy.ascontiguousarray(array_of(leaf.detach().cpu())).tobytes(), before)
        if isinstance(leaf, numpy.ndarray | numpy.generic) and not leaf.dtype.hasobject:
            return zlib.crc32(numpy.ascontiguousarray(leaf).tobytes(), before)
    return before


def checksum_of_numbers(numbers: Any, before: int = 0) -> int:
    """Return a checksum of sample numbers; `before` if they are other objects, whose text may differ between ranks."""
    try:
        array = numpy.asarray(numbers)
    except (TypeError, ValueError):
        return before
    return zlib.crc32(array.tobytes(), before) if array.dtype.kind in "iuUS" else before


def lines_of(dataset: Any) -> Iterator[str]:
    """Yield the properties of a data set that the ranks compare, one per line."""
    text = f"{type(dataset).__name__} of {len(dataset) if has_length(dataset) else 'an unknown number of'} samples"
    if isinstance(dataset, Subset):
        text += f", checksum of their numbers {_checksum_of_subset(dataset.indices):08x}"
        yield f"{text} (choose them with the same seed on every rank)"
        yield from lines_of(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        yield text
        for part in dataset.datasets:
            yield from lines_of(part)
    elif isinstance(dataset, TensorDataset):
        shapes = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in dataset.tensors]
        # Floats are left out, because another CPU may have rounded computed values to other bits.
        exact = [tensor for tensor in dataset.tensors if tensor.device.type == "cpu" and tensor.dtype in _EXACT]
        text += f": {', '.join(shapes)}, checksum {checksum(exact):08x}"
        yield f"{text} of the integers of the first and the last one"
    else:
        yield text


def _checksum_of_subset(indices: Any) -> int:
    if isinstance(indices, range):
        return zlib.crc32(repr(indices).encode())
    return checksum_of_numbers(indices.cpu() if isinstance(indices, torch.Tensor) else indices)


def has_length(data: Any) -> bool:
    """Whether the data has a length."""
    try:
        len(data)
    except (TypeError, NotImplementedError):  # from data without a length, and from a DataLoader of a stream
        return False
    return True
