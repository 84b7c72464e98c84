"""Arrays to a file, piece by piece, in the format of safetensors (github.com/huggingface/safetensors, "Format"): 8
bytes with the length of the header, the header (JSON: dtype, shape and place of each array), array after array.

The library reads these files, but would write one all at once, into pages that the kernel has to find first. If all
cores compute, that costs the training several times as much as pieces of a few MB do. Here each piece is hashed while
it is in the cache, written to the disk and dropped, so the next piece takes the same pages (figures: benchmarks/log/).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy

from mpitrain.state.manifest import File

# The dtypes that the format has a name for.
NAMES = {
    numpy.dtype(kind): name
    for kind, name in (
        ("?", "BOOL"),
        ("u1", "U8"),
        ("i1", "I8"),
        ("u2", "U16"),
        ("i2", "I16"),
        ("u4", "U32"),
        ("i4", "I32"),
        ("u8", "U64"),
        ("i8", "I64"),
        ("f2", "F16"),
        ("f4", "F32"),
        ("f8", "F64"),
        ("c8", "C64"),
        (ml_dtypes.bfloat16, "BF16"),
    )
}
_PIECE_BYTES = 4 << 20


def write_tensors(path: Path, tensors: Mapping[str, numpy.ndarray]) -> File:
    """Write CPU arrays of dtypes in NAMES to a new file, flush it to the disk, and return its size and checksum.

    Raises:
        OSError, UnicodeEncodeError: the file could not be written completely; it is not removed.
    """
    # Large items first, so that each array begins at a multiple of its items' size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        dtype = NAMES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    hashed, num_bytes = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in _pieces(len(text).to_bytes(8, "little") + text, (tensors[name] for name in order)):
            hashed.update(piece)
            written = 0
            while written < len(piece):
                written += os.write(descriptor, piece[written:])
            os.fdatasync(descriptor)
            with suppress(OSError):  # a hint: the kernel may reuse the pages at once
                os.posix_fadvise(descriptor, num_bytes, len(piece), os.POSIX_FADV_DONTNEED)
            num_bytes += len(piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return File(num_bytes, hashed.hexdigest())


def _pieces(first: bytes, arrays: Iterable[numpy.ndarray]) -> Iterator[memoryview]:
    """Yield all bytes in order. Small arrays share a piece, because each piece waits for the disk."""
    gathered = bytearray(first)
    for array in arrays:
        # The order in memory does not matter; the format puts the low byte first.
        flat = numpy.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(numpy.uint8).data
        for begin in range(0, len(flat), _PIECE_BYTES):
            piece = flat[begin : begin + _PIECE_BYTES]
            if len(gathered) + len(piece) > _PIECE_BYTES:
                yield memoryview(gathered)
                gathered = bytearray()
            if len(piece) == _PIECE_BYTES:
                yield piece
            else:
                gathered += piece
    yield memoryview(gathered)
