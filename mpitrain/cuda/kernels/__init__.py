"""Kernels over CuPy arrays. They run on the current stream, and the CPU never waits for them.

The sources are the *.cu files of this folder. arithmetic.h has the computation on one value, which the tests compare
with NumPy on the CPU. stride.h has the loops over arrays. docs/dev/cuda-kernels.md has a table of what each kernel
reads and writes. Arrays may have any length, and may lie at any address that is a multiple of their itemsize.

A launch takes only the address of an array. As with every CuPy kernel, memory that returns to CuPy's pool may be reused
by later work. On the same stream this is safe, on another stream it is not.
"""

from mpitrain.cuda.kernels.bucket import add, all_finite, clip_factor, pack, scale, squared_norm, sum_of
from mpitrain.cuda.kernels.codec import add_decoded, decode, encode, wire_bytes
from mpitrain.cuda.kernels.optimizer import Fused, adam, adamw, decay_bounds, sgd

__all__ = [
    "Fused",
    "adam",
    "adamw",
    "add",
    "add_decoded",
    "all_finite",
    "clip_factor",
    "decay_bounds",
    "decode",
    "encode",
    "pack",
    "scale",
    "sgd",
    "squared_norm",
    "sum_of",
    "wire_bytes",
]
