"""cupy.cuda: devices, memory, streams and events, by lists of things to do."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy

_here = threading.local()


def _num_devices() -> int:
    return int(os.environ.get("EMULATED_GPUS", "1"))


def _device() -> int:
    return getattr(_here, "device", 0)


def _current() -> Stream:
    return getattr(_here, "stream", Stream.null)


def get_current_stream() -> Stream:
    return _current()


def is_available() -> bool:
    return _num_devices() > 0


class Device:
    """A device; `use()` and `with` make it the thread's current one."""

    def __init__(self, device: int | None = None) -> None:
        self.id = _device() if device is None else int(device)
        self._before: list[int] = []

    def use(self) -> None:

        runtime.setDevice(self.id)

    def __enter__(self) -> Device:
        self._before.append(_device())
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        _here.device = self._before.pop()

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    __hash__ = None  # type: ignore[assignment]

    @property
    def compute_capability(self) -> str:
        return "90"

    @property
    def mem_info(self) -> tuple[int, int]:
        total = _limit()
        return total - _used.get(self.id, 0), total

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 4}

    def synchronize(self) -> None:
        for stream in list(Stream._all):
            if stream.device_id == self.id:
                stream._drain()


# Memory ---------------------------------------------------------------------------------------------------------


class OutOfMemoryError(MemoryError):
    """What CuPy's is called too."""


_used: dict[int, int] = {}


def _limit() -> int:
    return int(os.environ.get("EMULATED_GPU_BYTES", str(2**31)))


def _take(device: int, size: int) -> None:
    if _used.get(device, 0) + size > _limit():
        raise OutOfMemoryError(
            f"Out of memory allocating {size:,} bytes (allocated so far: {_used.get(device, 0):,} bytes)."
        )
    _used[device] = _used.get(device, 0) + size


def _give(device: int, size: int) -> None:
    _used[device] -= size


class Memory:
    """cudaMalloc: memory that can be handed to other processes."""

    def __init__(self, size: int) -> None:
        from .runtime import CUDARuntimeError

        self.size, self.device_id = size, _device()
        try:
            _take(self.device_id, size)
        except OutOfMemoryError:
            raise CUDARuntimeError(2) from None
        self._descriptor = os.memfd_create("emulated-gpu")
        os.ftruncate(self._descriptor, max(size, 1))
        self._bytes = numpy.frombuffer(mmap.mmap(self._descriptor, max(size, 1)), numpy.uint8)
        self.ptr = self._bytes.__array_interface__["data"][0]
        _blocks[self.ptr] = self
        weakref.finalize(self, _freed, self.device_id, size, self._descriptor).atexit = False


# cudaMalloc'ed blocks by address, for IPC handles.
_blocks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _freed(device: int, size: int, descriptor: int) -> None:
    _give(device, size)
    os.close(descriptor)


class PooledMemory:
    """From CuPy's pool: no handle of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, _device()
        _take(self.device_id, size)
        self._bytes = numpy.empty(max(size, 1), numpy.uint8)
        self.ptr = self._bytes.__array_interface__["data"][0]
        weakref.finalize(self, _give, self.device_id, size).atexit = False


class UnownedMemory:
    """Memory that somebody else owns."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        from .runtime import _opened

        self.ptr, self.size, self.device_id = ptr, size, _device() if device_id < 0 else device_id
        self._owner = owner
        opened = _opened.get(ptr)
        if opened is None:
            import ctypes

            opened = numpy.frombuffer((ctypes.c_uint8 * size).from_address(ptr), numpy.uint8)
        self._bytes = opened[:size]


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self._offset = mem, offset
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self._offset + offset)

    def __int__(self) -> int:
        return int(self.ptr)


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(PooledMemory(size), 0)


class MemoryPool:
    def free_all_blocks(self) -> None:
        pass

    def used_bytes(self) -> int:
        return _used.get(_device(), 0)


class PinnedMemoryPointer:
    """Page-locked host memory; supports the buffer protocol, as CuPy's does."""

    def __init__(self, size: int) -> None:
        self._bytes = bytearray(size)
        self.ptr = numpy.frombuffer(self._bytes, numpy.uint8).__array_interface__["data"][0] if size else 0
        self.mem = self

    def __buffer__(self, flags: int) -> memoryview:  # used from Python 3.12 on
        return memoryview(self._bytes)

    def size(self) -> int:
        return len(self._bytes)


def alloc_pinned_memory(size: int) -> Any:
    # CuPy rounds up; users must slice.
    return memoryview(bytearray(-(-max(size, 1) // 512) * 512))


# Streams --------------------------------------------------------------------------------------------------------


class Stream:
    """Work in order, done when somebody waits for it."""

    null: Stream
    _all: weakref.WeakSet[Stream] = weakref.WeakSet()
    _numbers = iter(range(1, 2**31))

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self.ptr = 0 if null else next(self._numbers)
        self.device_id = _device()
        self._todo: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()
        self._before: list[Stream | None] = []
        Stream._all.add(self)

    def _add(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._todo.append(work)

    def _drain(self) -> None:
        with self._lock:
            while self._todo:
                self._todo.popleft()()

    def synchronize(self) -> None:
        self._drain()

    @property
    def done(self) -> bool:
        # As if the device had gone on a little in the meantime.
        with self._lock:
            if self._todo:
                self._todo.popleft()()
            return not self._todo

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        ticket = event._ticket
        self._add(lambda: event._wait(ticket))

    def launch_host_func(self, callback: Callable[[Any], object], argument: Any) -> None:
        self._add(lambda: callback(argument))

    def use(self) -> Stream:
        _here.stream = self
        return self

    def __enter__(self) -> Stream:
        self._before.append(getattr(_here, "stream", None))
        return self.use()

    def __exit__(self, *_: object) -> None:
        before = self._before.pop()
        if before is None:
            del _here.stream
        else:
            _here.stream = before

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


Stream.null = Stream(null=True)
_DEADLINE_SECONDS = 30.0


class Event:
    """A point in a stream. Every record gets a number; an event has happened when its last number has."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            from .runtime import CUDARuntimeError

            raise CUDARuntimeError(1)
        self._interprocess = interprocess
        self._stream: Stream | None = None
        self._ticket = 0  # of the last record
        self._descriptor = os.memfd_create("emulated-event") if interprocess else -1
        if interprocess:
            os.ftruncate(self._descriptor, 16)
            # [recorded, happened], seen by other processes.
            self._counts = numpy.frombuffer(mmap.mmap(self._descriptor, 16), numpy.int64)
            weakref.finalize(self, os.close, self._descriptor).atexit = False
        else:
            self._counts = numpy.zeros(2, numpy.int64)
        self.ptr = id(self)
        _events[self.ptr] = self

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or _current()
        self._ticket += 1
        ticket = self._ticket
        self._counts[0] = ticket
        self._stream._add(lambda: self._counts.__setitem__(1, ticket))

    def _wait(self, ticket: int) -> None:
        if self._stream is not None:
            while self._counts[1] < ticket:
                with self._stream._lock:
                    if self._counts[1] < ticket:
                        self._stream._todo.popleft()()
            return
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while self._counts[1] < ticket:  # another process's
            if time.monotonic() > deadline:
                raise RuntimeError("an event of another process did not happen")
            time.sleep(0)

    def synchronize(self) -> None:
        self._wait(self._ticket)

    @property
    def done(self) -> bool:
        if self._counts[1] < self._ticket and self._stream is not None:
            with self._stream._lock, contextlib.suppress(IndexError):
                self._stream._todo.popleft()()
        return bool(self._counts[1] >= self._ticket)


_events: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def get_elapsed_time(start: Event, end: Event) -> float:
    end.synchronize()
    return 1e-3  # ms; an emulated clock would say nothing


class RawModule:
    """Kernels from source, compiled for the host: see kernels.py beside this package."""

    def __init__(
        self,
        *,
        code: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        name_expressions: Any = None,
        **_: Any,
    ) -> None:
        from host_kernels import HostModule

        self._module = HostModule(code, options)

    def get_function(self, name: str) -> Any:
        kernel = self._module.kernel(name)

        def launch(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            arguments: tuple[Any, ...],
            shared_mem: int = 0,
            stream: Any = None,
        ) -> None:
            from cupy import ndarray

            plain = []
            for one in arguments:
                if isinstance(one, numpy.ndarray) and one.ndim > 0:
                    raise TypeError(f"Unsupported type {type(one)}")
                plain.append(one._checked()._host if isinstance(one, ndarray) else one)
            (stream or _current())._add(lambda: kernel(grid, block, plain, shared_mem))

        return launch

    def compile(self, log_stream: Any = None) -> None:
        pass


from . import memory as memory
from . import nccl as nccl
from . import runtime as runtime
