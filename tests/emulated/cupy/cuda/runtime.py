"""cupy.cuda.runtime: the calls by their CUDA names."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy

from . import Event as _Event
from . import Stream, _blocks, _current, _events, _export, _here, _num_devices

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 1, 2, 3, 4
_NAMES = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    214: "cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
    201: "cudaErrorDeviceUninitialized: invalid device context",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
}


class CUDARuntimeError(RuntimeError):
    """The error that CuPy raises."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_NAMES[status])


def getDeviceCount() -> int:
    if driverGetVersion() // 1000 < runtimeGetVersion() // 1000:
        raise CUDARuntimeError(35)
    if _num_devices() == 0:
        raise CUDARuntimeError(100)
    return _num_devices()


def setDevice(device: int) -> None:
    if not 0 <= device < _num_devices():
        raise CUDARuntimeError(101)
    _here.device = device


def getDevice() -> int:
    return getattr(_here, "device", 0)


def getDeviceProperties(device: int) -> dict[str, Any]:
    return {"name": b"Emulated GPU", "major": 9, "minor": 0, "multiProcessorCount": 4, "totalGlobalMem": 2**31}


def deviceGetPCIBusId(device: int) -> str:
    return f"0000:{device + 1:02X}:00.0"


def driverGetVersion() -> int:
    return int(os.environ.get("EMULATED_DRIVER", "13000"))  # 0: none


def runtimeGetVersion() -> int:
    return 13000


def deviceSynchronize() -> None:
    from . import Device

    Device().synchronize()


def _stream(ptr: int) -> Stream:
    return Stream._all[ptr]


def _bytes(ptr: int, size: int) -> numpy.ndarray:
    return numpy.frombuffer((ctypes.c_uint8 * size).from_address(ptr), numpy.uint8)


def memcpyAsync(target: int, source: int, size: int, kind: int, stream: int) -> None:
    if size:
        _stream(stream)._add(lambda: ctypes.memmove(target, source, size))


def memcpy(target: int, source: int, size: int, kind: int) -> None:
    _current()._drain()
    if size:
        ctypes.memmove(target, source, size)


# Memory and events of other processes ---------------------------------------------------------------------------

_opened: dict[int, numpy.ndarray] = {}
ipcMemLazyEnablePeerAccess = 1


def ipcGetMemHandle(ptr: int) -> bytes:
    block = next((one for one in _blocks.values() if one.ptr <= ptr < one.ptr + max(one.size, 1)), None)
    if block is None:
        raise CUDARuntimeError(1)
    return struct.pack("<qqq", os.getpid(), block._descriptor, block.size).ljust(64, b"\0")  # of the whole block


def _map(pid: int, descriptor: int, size: int) -> numpy.ndarray:
    if pid == os.getpid():
        raise CUDARuntimeError(201)
    try:
        with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as file:
            return numpy.frombuffer(mmap.mmap(file.fileno(), max(size, 1)), numpy.uint8)
    except OSError:
        raise CUDARuntimeError(400) from None


def ipcOpenMemHandle(handle: bytes, flags: int = ipcMemLazyEnablePeerAccess) -> int:
    opened = _map(*struct.unpack_from("<qqq", handle))
    ptr = int(opened.__array_interface__["data"][0])
    _opened[ptr] = opened
    return ptr


def ipcCloseMemHandle(ptr: int) -> None:
    if _opened.pop(ptr, None) is None:
        raise CUDARuntimeError(1)


def ipcGetEventHandle(event: int) -> bytes:
    found = _events[event]
    if not found._interprocess:
        raise CUDARuntimeError(400)
    _export(found)
    return struct.pack("<qqq", os.getpid(), found._descriptor, 24).ljust(64, b"\0")


def ipcOpenEventHandle(handle: bytes) -> int:
    counts = _map(*struct.unpack_from("<qqq", handle)).view(numpy.int64)
    event = _Event.__new__(_Event)
    event._interprocess, event._is_foreign, event._counts, event._descriptor = True, True, counts, -1
    event.ptr = id(event)
    _events[event.ptr] = event
    _foreign[event.ptr] = event
    return event.ptr


_foreign: dict[int, Any] = {}


def eventDestroy(event: int) -> None:
    _foreign.pop(event, None)


def eventRecord(event: int, stream: int) -> None:
    _events[event].record(_stream(stream))


def eventSynchronize(event: int) -> None:
    _events[event].synchronize()


broken = 0  # a test breaks this process's GPU with the status that every query gives from then on


def eventQuery(event: int) -> int:
    if broken:
        return broken
    return 0 if _events[event].done else 600


def streamWaitEvent(stream: int, event: int, flags: int = 0) -> None:
    found = _events[event]
    ticket = int(found._counts[0]) if found._is_foreign else found._ticket  # its state at the time of the call
    _stream(stream)._add(lambda: found._try(ticket))


def hostRegister(ptr: int, size: int, flags: int = 0) -> None:
    pass


def hostUnregister(ptr: int) -> None:
    pass
