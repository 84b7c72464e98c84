"""Compression of a call: a tensor is shortened before it is sent, and restored afterwards."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """The interface of the argument `compression`."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and what `decompress` needs."""
        ...

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor that the result stands for."""
        ...


class _Unchanged:
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor


class _Half:
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor.to(context) if tensor.is_floating_point() else tensor


class Compression:
    """The compressors.

    Attributes:
        none: sends tensors as they are.
        fp16: sends floating tensors as float16. Sums are then made in float16 too.
    """

    none: Compressor = _Unchanged()
    fp16: Compressor = _Half()
