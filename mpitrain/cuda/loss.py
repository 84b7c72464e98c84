"""Which errors say that a GPU is lost: it is off the bus, or its memory is broken. No call on it succeeds any more."""

from __future__ import annotations

import sys

from mpitrain.cuda import device

# Errors of CUDA that a program does not cause, as they are listed for cudaError_t in the manual of CUDA's runtime API.
_OF_THE_DEVICE = {
    46: "cudaErrorDevicesUnavailable",
    100: "cudaErrorNoDevice",
    214: "cudaErrorECCUncorrectable",
    220: "cudaErrorNvlinkUncorrectable",
    714: "cudaErrorHardwareStackError",
    999: "cudaErrorUnknown",  # the driver's word for a GPU that does not answer
}


def lost_gpu(error: BaseException, given: str) -> str:
    """Say which GPU is lost, and how that showed; "": `error`, with its causes, is not the loss of a GPU.

    Args:
        error: an error of CuPy or PyTorch.
        given: this rank's device from the launcher; "" if it gave none.
    """
    cause: BaseException | None = error
    while cause is not None:
        if name := _OF_THE_DEVICE.get(_status(cause)):
            gpu = device.bound()
            return f"{gpu or given or 'its GPU'} is lost ({name})"
        cause = cause.__cause__
    return ""


def _status(error: BaseException) -> int:
    """Return CUDA's number of an error of CuPy or PyTorch; 0: it is none."""
    if (cupy := sys.modules.get("cupy")) and isinstance(
        error, cupy.cuda.runtime.CUDARuntimeError | cupy.cuda.driver.CUDADriverError
    ):
        return int(error.status)
    kind = getattr(sys.modules.get("torch"), "AcceleratorError", ())
    return int(getattr(error, "error_code", 0)) if isinstance(error, kind) else 0
