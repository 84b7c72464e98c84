"""Streams of a rank: its thread's current one computes, another one carries sums, and events order the two.

Only `wait_for_work` makes the host wait. Else a stream's work begins when the events that it was told to wait for have
happened; the host only looks (`happened`) where MPI must not touch memory before the device is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpitrain.arrays import Array, is_device_array
from mpitrain.cuda.device import Gpu, cupy_module
from mpitrain.errors import DeviceError

_NOT_READY = 600  # cudaErrorNotReady


def make_stream(gpu: Gpu) -> Any:
    """A stream of that GPU, which the null stream does not wait for, nor the reverse."""
    with gpu.current():
        return cupy_module().cuda.Stream(non_blocking=True)


def make_event(gpu: Gpu, interprocess: bool = False) -> Any:
    """An event, without the time at which it happens."""
    with gpu.current():
        return cupy_module().cuda.Event(disable_timing=True, interprocess=interprocess)


@contextmanager
def working_on(gpu: Gpu, stream: Any) -> Iterator[None]:
    """A block in which both are this thread's current ones."""
    cuda = cupy_module().cuda
    with gpu.current():
        before = cuda.get_current_stream()
        # Not `with stream`: leaving that forgets a stream that the caller has chosen by use().
        stream.use()
        try:
            yield
        finally:
            before.use()


def mark(gpu: Gpu, stream: Any = None) -> Any:
    """An event that happens when all that the stream (default: this thread's current one) has by now is done."""
    event = make_event(gpu)
    with gpu.current():
        event.record(stream or cupy_module().cuda.get_current_stream())
    return event


def happened(event: Any) -> bool:
    """Whether an event has happened. (CuPy's `event.done` is false for ever where the GPU has failed.)

    Raises:
        DeviceError: the GPU has failed: an address that is none, an error of its memory, a driver that is gone.
    """
    runtime = cupy_module().cuda.runtime
    status = runtime.eventQuery(event.ptr)
    if status in (0, _NOT_READY):
        return bool(status == 0)
    raise DeviceError(
        f"the GPU has failed: {runtime.CUDARuntimeError(status)}. Its memory is lost: end the job, look at nvidia-smi "
        "and dmesg (Xid), and go on from the last checkpoint; compute-sanitizer finds a kernel that leaves its arrays"
    )


def follow(gpu: Gpu, event: Any) -> None:
    """What this thread's current stream is given from now on begins after `event`."""
    with gpu.current():
        cupy_module().cuda.get_current_stream().wait_event(event)


def wait_for_work(array: Array) -> None:
    """Where the array is on a GPU, wait until all that this thread's current stream has by now is done."""
    if is_device_array(array):
        with array.device:
            cupy_module().cuda.get_current_stream().synchronize()
