"""Which errors say that a GPU is lost: it is off the bus, or its memory is broken. No call on it succeeds any more."""

from __future__ import annotations

import sys

from mpitrain.cuda import device
from mpitrain.world import World

# Errors of CUDA that a program does not cause, as they are listed for cudaError_t in the manual of CUDA's runtime API.
# DevicesUnavailable (46) and NoDevice (100) are not among them: these come before a process has used a GPU, mostly
# because of a wrong CUDA_VISIBLE_DEVICES, or a GPU that another process has for itself.
_OF_THE_DEVICE = {
    214: "cudaErrorECCUncorrectable",
    220: "cudaErrorNvlinkUncorrectable",
    714: "cudaErrorHardwareStackError",
    999: "cudaErrorUnknown",  # the driver's word for a GPU that does not answer
}


def lost_gpu(error: BaseException, world: World) -> str:
    """Say which GPU of this rank is lost, and how that showed; "": `error`, with its causes, is not the loss of a GPU.

    `error` is of CuPy or PyTorch.
    """
    cause: BaseException | None = error
    while cause is not None:
        if name := _OF_THE_DEVICE.get(_status(cause)):
            gpu = device.bound() or world.context.device(world.rank) or "its GPU"
            return f"{gpu} is lost ({name})"
        cause = cause.__cause__
    return ""


def is_lost(error: BaseException) -> bool:
    """Whether `error` itself, of CuPy or PyTorch, says that a GPU is lost. Only the rank of that GPU must have it."""
    return _status(error) in _OF_THE_DEVICE


def _status(error: BaseException) -> int:
    """Return CUDA's number of an error of CuPy or PyTorch; 0: it is none."""
    if (cupy := sys.modules.get("cupy")) and isinstance(
        error, cupy.cuda.runtime.CUDARuntimeError | cupy.cuda.driver.CUDADriverError
    ):
        return int(error.status)
    kind = getattr(sys.modules.get("torch"), "AcceleratorError", ())
    return int(getattr(error, "error_code", 0)) if isinstance(error, kind) else 0
