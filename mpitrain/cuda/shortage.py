"""What to say where a GPU's memory is used up in the middle of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.errors import DeviceError

REMEDY = (
    "Use smaller batches, a smaller model, precision='bf16', fewer ranks on this GPU, or smaller buckets "
    "(MPITRAIN_BUCKET_MIB)"
)


@contextmanager
def memory_explained() -> Iterator[None]:
    """A block in which CuPy's error for want of memory becomes one that says what there is and what to change.

    Raises:
        DeviceError: on this rank; the others are ended with it, as after every error of one rank alone.
    """
    try:
        yield
    except MemoryError as error:  # CuPy's is one
        cupy = sys.modules.get("cupy")
        if cupy is None or not isinstance(error, cupy.cuda.memory.OutOfMemoryError):
            raise
        device = cupy.cuda.Device()
        free, total = device.mem_info
        raise DeviceError(
            f"GPU {device.id} has no memory left: {error} {free:,} of its {total:,} bytes are free. {REMEDY}"
        ) from error
