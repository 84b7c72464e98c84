"""The explanation if a GPU's memory runs out in the middle of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.errors import DeviceError

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
REMEDY = (
    "Use smaller batches, a smaller model, precision='bf16', fewer ranks on this GPU, or smaller buckets "
    "(MPITRAIN_BUCKET_MIB)"
)


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
    """A context in which CuPy's error for lack of memory becomes one that says what is free and what to change.

    Raises:
        DeviceError: memory ran out on this rank. The other ranks end with it, as after every error of a single rank.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # CuPy's pool raises the first, CUDA the second
        if not is_shortage(error):
            raise
        device = sys.modules["cupy"].cuda.Device()
        free, total = device.mem_info
        raise DeviceError(
            f"GPU {device.id} has no memory left: {error} {free:,} of its {total:,} bytes are free. {REMEDY}"
        ) from error
