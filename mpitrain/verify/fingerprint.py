"""Short digests of data: hashes that identify samples, and sketches that give the distance of two arrays."""

from __future__ import annotations

import hashlib
import math
import zlib
from typing import TypedDict

import numpy

from mpitrain.arrays import Array, is_array, is_device_array
from mpitrain.tree import Tree, leaves, num_samples

NUM_PROJECTIONS = 8
_BLOCK_COUNT = 2**16


class Sketch(TypedDict):
    """The numbers that are kept of an array.

    `projections` are the array's inner products with random vectors of +1 and -1. The same name and size give the same
    vectors. The mean square of the differences of two arrays' projections is, on average, the squared distance of the
    arrays. With a chance of one in ten million, that mean square is below a hundredth of the squared distance.
    (Johnson and Lindenstrauss; Achlioptas 2003.)
    """

    dtype: str
    count: int
    norm: float
    projections: list[float]


def sketch(name: str, array: Array) -> Sketch:
    """Sketch an array in CPU or GPU memory, or a number; in float64, in one pass."""
    flat = numpy.ascontiguousarray(array.get() if is_device_array(array) else array).reshape(-1)
    signs = numpy.random.Philox(key=zlib.crc32(name.encode()))
    norm, projections = 0.0, numpy.zeros(NUM_PROJECTIONS)
    for begin in range(0, flat.size, _BLOCK_COUNT):
        block = flat[begin : begin + _BLOCK_COUNT].astype(numpy.float64)
        bits = numpy.unpackbits(signs.random_raw(-(-block.size // 8)).view(numpy.uint8)).reshape(-1, NUM_PROJECTIONS)
        # This scale keeps the squares of elements from overflowing or vanishing.
        largest = float(numpy.abs(block).max())
        scale = largest if 0 < largest < math.inf else 1.0
        block /= scale
        # The sign is 2 x bit - 1.
        projections += scale * (2 * (block @ bits[: block.size].astype(numpy.float64)) - block.sum())
        norm = math.hypot(norm, scale * math.sqrt(float(block @ block)))
    # The origin of a Python number is unknown.
    dtype = str(array.dtype) if hasattr(array, "dtype") else "float32"
    return {
        "dtype": dtype,
        "count": flat.size,
        "norm": norm,
        "projections": projections.tolist(),
    }


def distance(one: Sketch, other: Sketch) -> float:
    """Return approximately the 2-norm of the difference of two arrays of equal size."""
    pairs = zip(one["projections"], other["projections"], strict=True)
    return math.hypot(*(a - b for a, b in pairs)) / math.sqrt(NUM_PROJECTIONS)


def sample_hashes(batch: Tree) -> list[str]:
    """Hash each sample: the bytes of all its arrays. The hashes are in the batch's order.

    Raises:
        TreeError, DataError: the batch is not a tree of arrays with the samples along their first dimension.
    """
    count = num_samples(batch)
    arrays = [leaf.get() if is_device_array(leaf) else leaf for _, leaf in leaves(batch) if is_array(leaf)]
    signs = []
    for number in range(count):
        digest = hashlib.blake2b(digest_size=8)
        for array in arrays:
            digest.update(array[number].tobytes())
        signs.append(digest.hexdigest())
    return signs
