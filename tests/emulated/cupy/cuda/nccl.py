"""cupy.cuda.nccl: not there, as without libnccl; with EMULATED_NCCL=1 sums through a file that the ranks share.

As in NCCL, making a communicator waits for all ranks, and a call only puts work on the stream, where it waits for
the other ranks' work of the same number.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy

from . import BLOCKED, Stream

available = os.environ.get("EMULATED_NCCL") == "1"
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = (
    range(9)
)
NCCL_BFLOAT16 = 9
NCCL_SUM = 0
_DTYPES = [
    numpy.dtype(one) for one in ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16)
]  # fmt: skip
_MOST_BYTES, _MOST_RANKS = 2**26, 8
_DEADLINE_SECONDS = 120.0
_mine: list[int] = []


class NcclError(RuntimeError):
    pass


def get_unique_id() -> tuple[int, ...]:
    descriptor = os.memfd_create("emulated-nccl")
    os.ftruncate(descriptor, 4096 + _MOST_RANKS * _MOST_BYTES)
    _mine.append(descriptor)
    text = struct.pack("<qq", os.getpid(), descriptor).ljust(128, b"\0")
    return tuple(struct.unpack("128b", text))


class NcclCommunicator:
    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:
        if len(commId) != 128:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")
        pid, descriptor = struct.unpack_from("<qq", struct.pack("128b", *commId))
        with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as file:
            whole = numpy.frombuffer(mmap.mmap(file.fileno(), 4096 + _MOST_RANKS * _MOST_BYTES), numpy.uint8)
        self._ndev, self._rank, self._number = ndev, rank, 0
        self._is_destroyed = False
        self._counts = whole[: 8 * _MOST_RANKS].view(numpy.int64)
        self._slots = whole[4096:].reshape(_MOST_RANKS, _MOST_BYTES)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._arrive()
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not self._are_here():
            if time.monotonic() > deadline:
                raise NcclError("NCCL_ERROR_SYSTEM_ERROR: a rank does not come")
            time.sleep(0)
        threading.Thread(target=_go_on, args=(weakref.ref(self),), name="emulated NCCL", daemon=True).start()

    def destroy(self) -> None:
        """ncclCommDestroy: every rank calls it, with nothing in flight."""
        self._is_destroyed = True

    def _arrive(self) -> None:
        self._number += 1
        self._counts[self._rank] = self._number

    def _are_here(self) -> bool:
        return bool((self._counts[: self._ndev] >= self._number).all())

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        from .runtime import _stream

        on = _stream(stream)
        dtype = _DTYPES[datatype]
        size = count * dtype.itemsize
        if op != NCCL_SUM or size > _MOST_BYTES:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")

        def phases() -> Iterator[None]:
            ctypes.memmove(self._slots[self._rank].ctypes.data, sendbuf, size)
            self._arrive()
            while not self._are_here():
                yield
            parts = [slot[:size].view(dtype) for slot in self._slots[: self._ndev]]
            total = parts[0].copy()
            with numpy.errstate(all="ignore"):
                for part in parts[1:]:
                    total += part
            ctypes.memmove(recvbuf, total.ctypes.data, size)
            self._arrive()
            while not self._are_here():
                yield

        work = phases()
        self._streams.add(on)
        on._add(lambda: _step(work))


def _step(work: Iterator[None]) -> object:
    for _ in work:
        return BLOCKED
    return None


def _go_on(reference: weakref.ref[NcclCommunicator]) -> None:
    """A device continues while its host does something else: when other ranks wait for this one."""
    while (communicator := reference()) is not None and not communicator._is_destroyed:
        if communicator._counts[: communicator._ndev].max() > communicator._number:
            for stream in list(communicator._streams):
                stream._advance()
        del communicator
        time.sleep(1e-3)
