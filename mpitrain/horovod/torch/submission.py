"""How a call on tensors begins, and how its result is had. Tensors may be on the host or on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from mpitrain.horovod import waits
from mpitrain.horovod.exceptions import HorovodInternalError
from mpitrain.horovod.named_call import NamedCall
from mpitrain.horovod.named_channel import NamedChannel
from mpitrain.horovod.operations import Part
from mpitrain.horovod.process_sets import ProcessSet
from mpitrain.horovod.state import channel_of
from mpitrain.torch import checks
from mpitrain.torch.flat_tensors import FlatTensors, raw, values

Handle = NamedCall
Tensors = Sequence[torch.Tensor]
# Whether this thread will wait at once for the call that it begins. Then it drives the call itself, and the engine's
# thread would only be in its way.
_thread = threading.local()


def submit(
    kind: str,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    make: Callable[[NamedChannel, str], NamedCall],
    *,
    hurries: bool = True,
) -> Handle:
    """Submit what `make` makes of a channel and a key. If it cannot be made, the call fails on all ranks.

    Raises:
        TypeError, ValueError, HorovodInternalError: the call cannot be made. The text has the rank and the key.
    """
    channel = channel_of(process_set)
    key = channel.key(kind, name)
    try:
        checks.tensors(tensors, dtypes=False)
        call = make(channel, key)
    except (TypeError, ValueError, HorovodInternalError) as error:
        channel.refuse(key, type(error)(f"{channel.world.name()}: {key}: {error}"))
    return channel.submit(call, hurries=hurries and not getattr(_thread, "waits", False))


def poll(handle: Handle) -> bool:
    """Return whether a call has ended, so that synchronize() returns at once."""
    return waits.is_ended(handle)


def synchronize(handle: Handle) -> Any:
    """Wait for a call, and return its result: a tensor, a list of tensors, or a pair of tensors of alltoall.

    Raises:
        HorovodInternalError: the call has failed: the ranks differ, or one of them is gone.
    """
    output = waits.ended(handle)
    return output if handle.finish is None else handle.finish()


def now(begin: Callable[..., Handle], *arguments: Any) -> Any:
    """Make a call that returns a handle, wait for it, and return its result. Errors are those of both."""
    _thread.waits = True
    try:
        handle = begin(*arguments)
    finally:
        _thread.waits = False
    return synchronize(handle)


class CallOutputs:
    """The results of a call, which are made when their lengths are known, and what the call reads."""

    def __init__(self, inputs: Tensors, is_list: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self._inputs = inputs
        self._is_list = is_list
        self._buffers = FlatTensors()

    def read(self, tensor: torch.Tensor) -> Part:
        """Return the part that the call reads."""
        return part_of_call(values(self._buffers.read(tensor)), tensor)

    def make(self, place: int, shape: tuple[int, ...]) -> numpy.ndarray:
        """See operations.Make."""
        self.tensors.append(empty(shape, self._inputs[place]))
        return raw(self._buffers.write(self.tensors[-1]))

    def of(self, call: NamedCall) -> NamedCall:
        """Make these the outputs of a call."""
        call.buffers = self._buffers
        call.finish = lambda: self.tensors if self._is_list else self.tensors[0]
        return call


def empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of this shape with the dtype and place of another."""
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def part_of_call(flat: numpy.ndarray, tensor: torch.Tensor) -> Part:
    """Return the part of a call that has a tensor's shape and kind, and these values."""
    return Part(flat, tuple(tensor.shape), checks.kind(tensor))
