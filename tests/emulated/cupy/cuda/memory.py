"""cupy.cuda.memory."""

from . import Memory, MemoryPointer, MemoryPool, OutOfMemoryError, UnownedMemory, alloc

__all__ = ["Memory", "MemoryPointer", "MemoryPool", "OutOfMemoryError", "UnownedMemory", "alloc"]
