"""Arrays into a file, piece by piece, in the format of safetensors (github.com/huggingface/safetensors, "Format"): 8
bytes that say how long the header is, the header (JSON: dtype, shape and place of each array), array after array.

The library, which reads these files, would write one at once into pages that the kernel has to find first. Where all
cores compute, that costs the training several times what pieces of a few MB cost, each hashed while it is in the cache,
brought to the disk and dropped, so that the next one takes the same pages (docs/log.md has the figures).
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

from mpitrain.training.checkpoint.manifest import File

# What the format has a name for.
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
    """Write host arrays of dtypes in NAMES to a new file, and flush it to the disk; its size and checksum.

    Raises:
        OSError, UnicodeEncodeError: it could not be written; what there is of it stays.
    """
    # Large items first: so each array begins at a multiple of its items' size.
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
            with suppress(OSError):  # a hint, by which the kernel may use the pages again at once
                os.posix_fadvise(descriptor, num_bytes, len(piece), os.POSIX_FADV_DONTNEED)
            num_bytes += len(piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return File(num_bytes, hashed.hexdigest())


def _pieces(first: bytes, arrays: Iterable[numpy.ndarray]) -> Iterator[memoryview]:
    """All bytes in order; small arrays together, for each piece waits for the disk."""
    gathered = bytearray(first)
    for array in arrays:
        # Whatever its order in memory was; the format has the low byte first.
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
