"""What the ranks compare of their data sets before the first batch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from mpitrain.torch.batches import checksum
from mpitrain.torch.drawn import checksum_of_numbers

_EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def lines_of(dataset: Any) -> Iterator[str]:
    """Yield what is compared of a data set, one item per line."""
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
    """Whether len() knows the length of the data."""
    try:
        len(data)
    except (TypeError, NotImplementedError):  # from data without a length, and from a DataLoader of a stream
        return False
    return True
