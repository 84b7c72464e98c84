"""Batches of any structure: the number of samples, and a part of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of
from mpitrain.errors import DataError
from mpitrain.exchange.trees import aligned_copy


def described(batch: Any) -> tuple[int, str]:
    """Return the number of samples of a batch, and a text with it and a checksum of the first and the last sample.

    Raises:
        DataError: no tensor or array has samples along its first dimension, or their numbers differ.
    """
    leaves = [leaf for leaf in _leaves(batch) if _has_samples(leaf)]
    lengths = sorted({len(leaf) for leaf in leaves})
    if len(lengths) != 1:
        raise DataError(
            "tensors and arrays of a batch must have the same number of samples along their first dimension; found "
            + (", ".join(str(length) for length in lengths) if leaves else f"none in a {type(batch).__name__}")
        )
    return lengths[0], f"{lengths[0]} samples, checksum {checksum(leaves[:1]):08x}"


def arrays_of(batch: Any) -> list[numpy.ndarray]:
    """Return the tensors and arrays of a batch that have samples along the first dimension, on the host."""
    leaves = [leaf for leaf in _leaves(batch) if _has_samples(leaf)]
    return [array_of(leaf.cpu()) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def divided(batch: Any, part: slice, total: int) -> Any:
    """Return these samples of a batch of `total`, out of each tensor, array, and list of texts or numbers.

    Raises:
        DataError: the batch holds something else.
    """

    def one(leaf: Any) -> Any:
        if _has_samples(leaf):
            return leaf[part]
        if isinstance(leaf, list | tuple) and len(leaf) == total:
            return leaf[part]
        if leaf is None or isinstance(leaf, str | bytes | bool | int | float | list | tuple | torch.Tensor):
            return leaf
        raise DataError(
            f"a batch holds a {type(leaf).__name__}, which cannot be divided among ranks; allowed are tensors, arrays "
            "and lists in dicts, lists and tuples"
        )

    return _mapped(batch, one)


def copied(batch: Any) -> Any:
    """Return a batch with tensors and arrays in new memory, which begins at a multiple of 64 bytes."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone(memory_format=torch.contiguous_format)
        return aligned_copy(leaf) if isinstance(leaf, numpy.ndarray) else leaf

    return _mapped(batch, one)


def _mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(batch, dict):
        return {key: _mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, list | tuple) and not _is_column(batch):
        return type(batch)(_mapped(value, function) for value in batch)
    return function(batch)


def _leaves(batch: Any) -> list[Any]:
    leaves: list[Any] = []
    _mapped(batch, leaves.append)
    return leaves


def _is_column(batch: list[Any] | tuple[Any, ...]) -> bool:
    """True if a list has one text or number per sample; a DataLoader leaves texts in this form."""
    return bool(batch) and all(isinstance(value, str | bytes | bool | int | float) for value in batch)


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | numpy.ndarray) and leaf.ndim > 0


def checksum(leaves: Sequence[Any]) -> int:
    """Return a checksum of the first and the last sample of each tensor or array."""
    result = 0
    for leaf in leaves:
        for sample in (leaf[0], leaf[-1]) if len(leaf) else ():
            value = array_of(sample.cpu()) if isinstance(sample, torch.Tensor) else numpy.asarray(sample)
            result = zlib.crc32(numpy.ascontiguousarray(value).tobytes(), result)
    return result
