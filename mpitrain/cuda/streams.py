"""Streams of a rank: its thread's current stream computes, another stream carries sums, and events order the two.

Only `wait_for_work` makes the host wait. Otherwise a stream's work begins when the events that it waits for have
happened. The host only checks them (`happened`) where MPI must not touch memory before the device is done with it.
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
    """Make a stream of this GPU. It does not wait for the null stream, nor the reverse."""
    with gpu.current():
        return cupy_module().cuda.Stream(non_blocking=True)


def make_event(gpu: Gpu, interprocess: bool = False) -> Any:
    """Make an event without timing."""
    with gpu.current():
        return cupy_module().cuda.Event(disable_timing=True, interprocess=interprocess)


@contextmanager
def working_on(gpu: Gpu, stream: Any) -> Iterator[None]:
    """A context in which the GPU and the stream are this thread's current ones."""
    cuda = cupy_module().cuda
    with gpu.current():
        before = cuda.get_current_stream()
        # Do not use `with stream`: its end would forget a stream that the caller has chosen with use().
        stream.use()
        try:
            yield
        finally:
            before.use()


def mark(gpu: Gpu, stream: Any = None) -> Any:
    """Return an event that happens when the current work of the stream (default: this thread's current) is done."""
    event = make_event(gpu)
    with gpu.current():
        event.record(stream or cupy_module().cuda.get_current_stream())
    return event


def happened(event: Any) -> bool:
    """True if an event has happened. (CuPy's `event.done` stays false for ever if the GPU has failed.)

    Raises:
        DeviceError: the GPU has failed: an invalid address, an error of its memory, a driver that is gone.
    """
    runtime = cupy_module().cuda.runtime
    status = runtime.eventQuery(event.ptr)
    if status in (0, _NOT_READY):
        return bool(status == 0)
    raise DeviceError(
        f"the GPU has failed: {runtime.CUDARuntimeError(status)}. Its memory is lost. End the job, look at nvidia-smi "
        "and dmesg (Xid), and resume from the last checkpoint; compute-sanitizer finds kernels that exceed their arrays"
    )


def follow(gpu: Gpu, event: Any) -> None:
    """Let later work in this thread's current stream begin after `event`."""
    with gpu.current():
        cupy_module().cuda.get_current_stream().wait_event(event)


def wait_for_work(array: Array) -> None:
    """If the array is on a GPU, wait until the current work of this thread's current stream is done."""
    if is_device_array(array):
        with array.device:
            cupy_module().cuda.get_current_stream().synchronize()
