"""cupy.cuda: devices, memory, streams and events, by lists of things to do."""

from __future__ import annotations

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


_lost = 0  # the error of every call since the GPU was lost


def lose(status: int) -> None:
    """From now on no call of this process on a GPU succeeds, as when a GPU falls off the bus."""
    global _lost  # noqa: PLW0603 - of this process
    _lost = status


def _device() -> int:
    if _lost:
        raise runtime.CUDARuntimeError(_lost)
    return getattr(_here, "device", 0)


def _current() -> Stream:
    return getattr(_here, "stream", Stream.null)


def get_current_stream() -> Stream:
    return _current()


def is_available() -> bool:
    try:
        return bool(runtime.getDeviceCount() > 0)
    except runtime.CUDARuntimeError:
        return False


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
    def mem_info(self) -> tuple[int, int]:
        total = _limit()
        return max(0, total - _others() - _used.get(self.id, 0)), total

    @property
    def pci_bus_id(self) -> str:
        return runtime.deviceGetPCIBusId(self.id)

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 4}

    def synchronize(self) -> None:
        for stream in list(Stream._all.values()):
            if stream.device_id == self.id:
                stream._drain()


# Memory ---------------------------------------------------------------------------------------------------------


class OutOfMemoryError(MemoryError):
    """The class has the name of CuPy's."""


_used: dict[int, int] = {}


def _limit() -> int:
    return int(os.environ.get("EMULATED_GPU_BYTES", str(2**31)))


def _others() -> int:
    """The memory that other processes have taken."""
    return int(os.environ.get("EMULATED_BYTES_OF_OTHERS", "0"))


def _take(device: int, size: int) -> None:
    if _used.get(device, 0) + size > _limit() - _others():
        raise OutOfMemoryError(
            f"Out of memory allocating {size:,} bytes (allocated so far: {_used.get(device, 0):,} bytes)."
        )
    _used[device] = _used.get(device, 0) + size


def _give(device: int, size: int, memory: numpy.ndarray) -> None:
    _used[device] -= size
    # Kernels that have been given its address may still have to run. A device's pool would keep it mapped.
    for stream in list(Stream._all.values()):
        if stream.device_id == device and stream._todo:
            stream._add(lambda: memory)


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
        weakref.finalize(self, _freed, self.device_id, size, self._descriptor, self._bytes).atexit = False


# cudaMalloc'ed blocks by address, for IPC handles.
_blocks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _freed(device: int, size: int, descriptor: int, memory: numpy.ndarray) -> None:
    _give(device, size, memory)
    os.close(descriptor)


class PooledMemory:
    """Memory of CuPy's pool, which has no handle of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.device_id = size, _device()
        _take(self.device_id, size)
        self._bytes = numpy.empty(max(size, 1), numpy.uint8)
        self.ptr = self._bytes.__array_interface__["data"][0]
        weakref.finalize(self, _give, self.device_id, size, self._bytes).atexit = False


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
    """Keeps nothing for later."""

    def free_all_blocks(self) -> None:
        pass

    def used_bytes(self) -> int:
        return _used.get(_device(), 0)


def alloc_pinned_memory(size: int) -> Any:
    _device()
    # CuPy rounds up; users must slice.
    return memoryview(bytearray(-(-max(size, 1) // 512) * 512))


# Streams --------------------------------------------------------------------------------------------------------


# Work that cannot be done yet returns this, and is tried again.
BLOCKED = object()
_DEADLINE_SECONDS = 120.0
# All streams share one lock. With one lock each, two threads that follow events across streams could deadlock.
_gpu_lock = threading.RLock()


class Stream:
    """Work in order, done when somebody waits for it."""

    null: Stream
    _all: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()  # by ptr
    _numbers = iter(range(1, 2**31))

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self.ptr = 0 if null else next(self._numbers)
        self.device_id = _device()
        self._todo: deque[Callable[[], object]] = deque()
        self._is_running = False
        self._before: list[Stream | None] = []
        Stream._all[self.ptr] = self

    def _add(self, work: Callable[[], object]) -> None:
        with _gpu_lock:
            self._todo.append(work)

    def _advance(self) -> bool:
        """Do the first thing that is to be done, if it can be done now; false if not."""
        with _gpu_lock:
            if self._is_running or not self._todo:  # running: it is among what its first thing waits for
                return False
            self._is_running = True
            try:
                if self._todo[0]() is BLOCKED:
                    return False
                self._todo.popleft()
            finally:
                self._is_running = False
            return True

    def _drain(self) -> None:
        _until(lambda: not self._todo, self)

    def synchronize(self) -> None:
        self._drain()

    @property
    def done(self) -> bool:
        # As if the device had gone on a little in the meantime.
        self._advance()
        return not self._todo

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        ticket = event._ticket
        self._add(lambda: event._try(ticket))

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


def _until(is_over: Callable[[], bool], stream: Stream | None) -> None:
    """Drive a stream until that; an error after so long without progress."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not is_over():
        if stream is not None and stream._advance():
            deadline = time.monotonic() + _DEADLINE_SECONDS
        elif time.monotonic() > deadline:
            raise RuntimeError("the emulated GPU waits for an event that does not happen")
        else:
            time.sleep(0)


class Event:
    """A point in a stream. Every record gets a number; an event has happened when its last number has."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            from .runtime import CUDARuntimeError

            raise CUDARuntimeError(1)
        self._interprocess = interprocess
        self._is_foreign = False
        self._ticket = 0  # of the last record
        self._open: dict[int, Stream] = {}  # records that have not happened yet
        self._descriptor = os.memfd_create("emulated-event") if interprocess else -1
        if interprocess:
            os.ftruncate(self._descriptor, 24)
            # [recorded, happened, wanted by another process], seen by other processes.
            self._counts = numpy.frombuffer(mmap.mmap(self._descriptor, 24), numpy.int64)
            weakref.finalize(self, os.close, self._descriptor).atexit = False
        else:
            self._counts = numpy.zeros(3, numpy.int64)
        self.ptr = id(self)
        _events[self.ptr] = self

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or _current()
        self._ticket += 1
        ticket = self._ticket
        self._counts[0] = ticket
        self._open[ticket] = stream
        stream._add(lambda: self._happens(ticket))

    def _happens(self, ticket: int) -> None:
        self._counts[1] = max(self._counts[1], ticket)
        del self._open[ticket]

    def _try(self, ticket: int) -> object:
        """For streams: BLOCKED until the record of that number has happened, whatever was recorded later, and where."""
        if self._is_foreign:
            if self._counts[1] < ticket:
                self._counts[2] = max(self._counts[2], ticket)
                return BLOCKED
        elif ticket in self._open:
            self._open[ticket]._advance()
            return BLOCKED if ticket in self._open else None
        return None

    def synchronize(self) -> None:
        ticket = self._ticket
        _until(lambda: self._try(ticket) is None, None)

    @property
    def done(self) -> bool:
        # As if the device had gone on a little in the meantime.
        return self._try(self._ticket) is None


_events: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_exported: weakref.WeakSet[Event] = weakref.WeakSet()
_LOOK_SECONDS = 0.5e-3


def _export(event: Event) -> None:
    """From now on another process may wait for it. A device continues while its host does something else."""
    with _gpu_lock:
        if not _exported:
            threading.Thread(target=_go_on, name="emulated device", daemon=True).start()
        _exported.add(event)


def _go_on() -> None:
    while True:
        with _gpu_lock:
            events = list(_exported)
            if not events:
                return
        for event in events:
            wanted = int(event._counts[2])
            if event._counts[1] < wanted:
                event._try(wanted)
        del events
        time.sleep(_LOOK_SECONDS)


def get_elapsed_time(start: Event, end: Event) -> float:
    end.synchronize()
    return 1e-3  # ms; an emulated clock would say nothing


class RawModule:
    """Kernels from source, compiled for the host when first needed: see host_kernels.py beside this package."""

    def __init__(
        self,
        *,
        code: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        name_expressions: Any = None,
        **_: Any,
    ) -> None:
        self.code, self.options, self._module = code, options, None

    def compile(self, log_stream: Any = None) -> None:
        from host_kernels import CompilationError, HostModule

        if self._module is None:
            try:
                self._module = HostModule(self.code, self.options)
            except CompilationError as error:
                raise compiler.CompileException(str(error), self.code, "kernels.cu", self.options) from None

    def get_function(self, name: str) -> Any:
        self.compile()
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
                if isinstance(one, numpy.ndarray) and one.size != 1:
                    raise TypeError(
                        f"You are trying to pass a numpy.ndarray of shape {one.shape} as a kernel parameter."
                    )
                if isinstance(one, ndarray):
                    plain.append(one._checked()._host)
                else:  # what is passed by value is copied at once
                    plain.append(one.copy() if isinstance(one, numpy.ndarray) else one)
            (stream or _current())._add(lambda: kernel(grid, block, plain, shared_mem))

        return launch


from . import compiler as compiler
from . import driver as driver
from . import memory as memory
from . import nccl as nccl
from . import runtime as runtime
