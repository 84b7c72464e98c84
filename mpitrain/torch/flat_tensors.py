"""The tensors of one call as flat arrays on the CPU."""

from __future__ import annotations

from functools import cache

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of


class FlatTensors:
    """Flat arrays over tensors, or over a copy on the CPU if a tensor is elsewhere or not contiguous.

    A contiguous tensor on the CPU is its own buffer: nothing is copied. A tensor on a GPU is copied to pinned memory
    when the call begins, after the work queued in its current stream, and back when the call ends. Both copies are
    waited for, so every stream sees the result. (Written to CUDA's rules; not tested on a GPU.)
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor, and the copy that holds its result
        self.kept: list[torch.Tensor] = []  # tensors that are read until the call ends

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat CPU tensor with the tensor's values. Do not write to it."""
        flat = _flat(tensor)
        if flat is None:
            flat = _copy(tensor, filled=True)
        self.kept.append(flat)
        return flat

    def write(self, tensor: torch.Tensor, *, filled: bool = False) -> torch.Tensor:
        """Return a flat CPU tensor for the tensor's new values; with `filled` it holds the old ones."""
        flat = _flat(tensor)
        if flat is None:
            flat = _copy(tensor, filled)
            self._copies.append((tensor.detach(), flat))
        self.kept.append(flat)
        return flat

    def finish(self) -> None:
        """Copy the results to the tensors that have a copy."""
        for tensor, flat in self._copies:
            if tensor.is_cuda:
                # A stream of its own, so that this does not wait for work in the thread's current stream.
                stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                with torch.cuda.stream(stream):
                    tensor.copy_(flat.view(tensor.shape), non_blocking=True)
                stream.synchronize()
            else:
                tensor.copy_(flat.view(tensor.shape))


def values(flat: torch.Tensor) -> numpy.ndarray:
    """Return the array over a flat CPU tensor, in its own dtype, for arithmetic."""
    return raw(flat).view(_dtype_of(flat.dtype))


def raw(flat: torch.Tensor) -> numpy.ndarray:
    """Return the array over a flat CPU tensor as bytes, for any dtype."""
    return numpy.asarray(_Memory(flat))


class _Memory:
    """A flat CPU tensor in a form that NumPy accepts.

    After `tensor.numpy()`, torch never allows the tensor's storage to be resized again, which FSDP does after each use.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat  # the array refers to this object, which keeps the memory alive
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (flat.nbytes,),
            "data": (flat.data_ptr(), False),
        }


@cache
def _dtype_of(dtype: torch.dtype) -> numpy.dtype:
    return array_of(torch.empty(0, dtype=dtype)).dtype


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a contiguous CPU tensor itself, flattened; None for any other tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    # Do not make a view: a tensor with at most one element may have strides that cannot be viewed as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _copy(tensor: torch.Tensor, filled: bool) -> torch.Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    if tensor.is_cuda:
        # Wait even if nothing is read: earlier work in the stream must not overwrite the result.
        torch.cuda.current_stream(tensor.device).synchronize()
    if filled:
        flat.view(tensor.shape).copy_(tensor.detach())
    return flat
