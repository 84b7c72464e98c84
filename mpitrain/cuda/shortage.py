"""What to say where a GPU's memory is used up in the middle of a model."""

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
    """Whether it is CuPy's error, or CUDA's, for want of a GPU's memory."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    # The driver's own, where a kernel is loaded onto a GPU that is full by its first launch.
    if isinstance(error, cupy.cuda.runtime.CUDARuntimeError | cupy.cuda.driver.CUDADriverError):
        return bool(error.status == _OUT_OF_MEMORY)
    return isinstance(error, cupy.cuda.memory.OutOfMemoryError)


@contextmanager
def memory_explained() -> Iterator[None]:
    """A block in which CuPy's error for want of memory becomes one that says what there is and what to change.

    Raises:
        DeviceError: on this rank; the others are ended with it, as after every error of one rank alone.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # CuPy's pool raises the one, CUDA the other
        if not is_shortage(error):
            raise
        device = sys.modules["cupy"].cuda.Device()
        free, total = device.mem_info
        raise DeviceError(
            f"GPU {device.id} has no memory left: {error} {free:,} of its {total:,} bytes are free. {REMEDY}"
        ) from error
