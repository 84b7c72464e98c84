"""Kernels over CuPy arrays, on the current stream unless `stream` is given; the host waits for none of them.

The sources are the *.cu files of this folder. What they compute with one value is in arithmetic.h, which the tests
compare with NumPy on the CPU; how they go over arrays is in stride.h. docs/cuda.md has the table of what each reads
and writes. Arrays may have any length and lie at any address that is a multiple of their itemsize.

A launch takes an array's address and no more: as with every CuPy kernel, memory that is given back to CuPy's pool may
be used again by what comes next on the same stream, which is safe, and on another one, which is not.
"""

from mpitrain.cuda.kernels.bucket import add, all_finite, pack, scale, sum_of, unpack
from mpitrain.cuda.kernels.codec import add_decoded, decode, encode, wire_bytes
from mpitrain.cuda.kernels.norm import clip_factor, squared_norm
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
    "unpack",
    "wire_bytes",
]
