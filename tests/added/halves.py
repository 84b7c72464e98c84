"""A codec: IEEE's half precision by NumPy alone, without kernels for GPUs."""

import numpy

from mpitrain.compression.cast import parts, twin
from mpitrain.compression.codec import ArrayCodec


def halves(compiled):
    return ArrayCodec(
        "halves", parts, twin(numpy.dtype(numpy.float16), 0x7E00), False, relative_error=2.0**-11, may_overflow=True
    )
