"""Memory for transfers: page-locked CPU memory, and GPU memory that other processes can open.

Memory for other processes is allocated separately (cudaMalloc): the handle of an array from CuPy's pool would be that
of the whole block around it (CuPy issue 9436).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda.device import Gpu, cupy_module, raise_first
from mpitrain.cuda.failures import REMEDY, is_lost, is_shortage
from mpitrain.errors import DeviceError
from mpitrain.world.world import World

PAGE_BYTES = 4096


@contextmanager
def explained(problem: str, remedy: str = "") -> Iterator[None]:
    """A context in which a CUDA error becomes one that all ranks may raise, with the problem and a remedy.

    Raises:
        DeviceError: the call has failed.
        CUDARuntimeError: the GPU itself is lost. This rank alone must end with it.
    """
    try:
        yield
    except cupy_module().cuda.runtime.CUDARuntimeError as error:
        if is_lost(error):
            raise
        raise DeviceError(f"{problem}: {error}{remedy}") from None


def pinned(num_bytes: int) -> numpy.ndarray:
    """Return page-locked host memory, uint8[num_bytes], uninitialised. The GPU copies it while the CPU continues."""
    with explained(f"cannot allocate {num_bytes:,} bytes of page-locked memory", "; see free -h"):
        memory = cupy_module().cuda.alloc_pinned_memory(max(num_bytes, 1))  # rounds up
    return numpy.frombuffer(memory, numpy.uint8, max(num_bytes, 1))[:num_bytes]


def is_page_aligned(array: numpy.ndarray) -> bool:
    """True if the array begins at a page, so that no other array shares its first page and it may be page-locked."""
    return address(array) % PAGE_BYTES == 0


def page_lock(array: numpy.ndarray) -> None:
    """Page-lock existing host memory, which must begin at a page, until the array is gone."""
    runtime = cupy_module().cuda.runtime
    at = address(array)
    with explained(f"{array.nbytes:,} bytes cannot be page-locked", "; see free -h"):
        runtime.hostRegister(at, array.nbytes, 0)
    weakref.finalize(array, runtime.hostUnregister, at).atexit = False


def address(array: numpy.ndarray) -> int:
    """Return the address of the first byte of a host array."""
    return int(array.__array_interface__["data"][0])


def raw(gpu: Gpu, num_bytes: int, purpose: str) -> Any:
    """Allocate a separate block of the GPU's memory, a cupy.cuda.Memory, uninitialised.

    Raises:
        DeviceError: there is not enough memory, and the error gives the free memory and the setting to change; or the
            allocation failed for another reason.
        CUDARuntimeError: the GPU itself is lost. This rank alone must end with it.
    """
    cupy = cupy_module()
    with gpu.current(), explained(f"{gpu} cannot give {num_bytes:,} bytes for {purpose}", "; see nvidia-smi"):
        try:
            return cupy.cuda.Memory(max(num_bytes, 1))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            if not is_shortage(error):
                raise
            # The pool keeps the memory of freed arrays, and the driver cannot reclaim it.
            cupy.get_default_memory_pool().free_all_blocks()
        try:
            return cupy.cuda.Memory(max(num_bytes, 1))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            if not is_shortage(error):
                raise
            raise out_of_memory(gpu, num_bytes, purpose, error) from None


@contextmanager
def allocating(world: World, gpu: Gpu, num_bytes: int, purpose: str) -> Iterator[None]:
    """A context in which every rank allocates `num_bytes` on its GPU, which is current. Its end is collective.

    Raises:
        DeviceError: some rank lacks the memory, on its GPU or page-locked. Raised on every rank.
    """
    problem = ""
    with gpu.current():
        try:
            yield
        except DeviceError as error:
            problem = str(error)
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            problem = str(out_of_memory(gpu, num_bytes, purpose, error))
    raise_first(world, world.allgather(problem))


def out_of_memory(gpu: Gpu, num_bytes: int, purpose: str, error: Exception) -> DeviceError:
    """Return the error to raise if an allocation has failed."""
    free, total = gpu.memory()
    return DeviceError(
        f"{gpu} has no {num_bytes:,} bytes for {purpose}: {free:,} of {total:,} are free ({error}). {REMEDY}"
    )


def array_in(gpu: Gpu, pointer: int, num_bytes: int, owner: object) -> Array:
    """Return device memory that belongs to `owner` as an array, uint8[num_bytes]. The array keeps `owner` alive."""
    cupy = cupy_module()
    with gpu.current():
        memory = cupy.cuda.UnownedMemory(pointer, max(num_bytes, 1), owner, gpu.number)
        return cupy.ndarray((num_bytes,), numpy.uint8, cupy.cuda.MemoryPointer(memory, 0))


def open_block(gpu: Gpu, handle: bytes) -> int:
    """Open another process's block, and return its address here.

    Raises:
        DeviceError: the block cannot be opened. Its process has ended or is in another container, or the GPUs cannot
            reach each other.
    """
    remedy = (
        ". Has its process ended, is it in another container, or can their GPUs not reach each other (nvidia-smi topo "
        "-p2p r)?"
    )
    with gpu.current(), explained(f"{gpu} cannot open another rank's GPU memory", remedy):
        return int(cupy_module().cuda.runtime.ipcOpenMemHandle(handle))
