"""The meaning of errors of CuPy, CUDA and PyTorch: a GPU is lost, or its memory has run out.

A lost GPU is off the bus, or its memory is broken. No call on it succeeds any more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.cuda import device
from mpitrain.errors import DeviceError, causes_of
from mpitrain.world.world import World

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
REMEDY = (
    "Use smaller batches, a smaller model, precision='bf16', fewer ranks on this GPU, or smaller buckets "
    "(MPITRAIN_BUCKET_MIB)"
)

# Errors of CUDA that a program does not cause, as they are listed for cudaError_t in the manual of CUDA's runtime API.
# DevicesUnavailable (46) and NoDevice (100) are not among them: these occur before a process has used a GPU, mostly
# because of a wrong CUDA_VISIBLE_DEVICES, or a GPU that another process uses exclusively.
_OF_THE_DEVICE = {
    214: "cudaErrorECCUncorrectable",
    220: "cudaErrorNvlinkUncorrectable",
    714: "cudaErrorHardwareStackError",
    999: "cudaErrorUnknown",  # the driver's status for a GPU that does not answer
}


# The exceptions for lack of GPU memory: CuPy's pool raises the first, CUDA the second.
SHORTAGES = (MemoryError, RuntimeError)


def lost_gpu(error: BaseException, world: World) -> str:
    """Describe which GPU of this rank is lost, and how that showed; "": `error`, with its causes, is not the loss of a
    GPU.

    `error` comes from CuPy or PyTorch.
    """
    for cause in causes_of(error):
        if name := _OF_THE_DEVICE.get(_status(cause)):
            gpu = device.bound() or world.context.device(world.rank) or "its GPU"
            return f"{gpu} is lost ({name})"
    return ""


def is_lost(error: BaseException) -> bool:
    """Whether `error` itself, of CuPy or PyTorch, means that a GPU is lost. It must come from the rank of that GPU."""
    return _status(error) in _OF_THE_DEVICE


def _status(error: BaseException) -> int:
    """Return CUDA's number of an error of CuPy or PyTorch; 0: it is not a CUDA error."""
    if (cupy := sys.modules.get("cupy")) and isinstance(
        error, cupy.cuda.runtime.CUDARuntimeError | cupy.cuda.driver.CUDADriverError
    ):
        return int(error.status)
    kind = getattr(sys.modules.get("torch"), "AcceleratorError", ())
    return int(getattr(error, "error_code", 0)) if isinstance(error, kind) else 0


def is_shortage(error: BaseException) -> bool:
    """True if the error is CuPy's or CUDA's for lack of GPU memory."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    # The driver raises its own error if the first launch loads a kernel onto a full GPU.
    if isinstance(error, cupy.cuda.runtime.CUDARuntimeError | cupy.cuda.driver.CUDADriverError):
        return bool(error.status == _OUT_OF_MEMORY)
    return isinstance(error, cupy.cuda.memory.OutOfMemoryError)


@contextmanager
def memory_explained() -> Iterator[None]:
    """A context in which CuPy's error for lack of memory becomes one that names the free memory and what to change.

    Raises:
        DeviceError: memory ran out on this rank. The other ranks end with it, as after every error of a single rank.
    """
    try:
        yield
    except SHORTAGES as error:
        explain_shortage(error)
        raise


def explain_shortage(error: BaseException) -> None:
    """If `error`, one of SHORTAGES, is for lack of GPU memory, raise one that names the free memory and what to change.

    Raises:
        DeviceError: see memory_explained.
    """
    if is_shortage(error):
        gpu = sys.modules["cupy"].cuda.Device()
        free, total = gpu.mem_info
        raise DeviceError(
            f"GPU {gpu.id} has no memory left: {error} {free:,} of its {total:,} bytes are free. {REMEDY}"
        ) from error
