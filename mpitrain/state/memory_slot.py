"""A copy of a state in memory that outlives its process as long as some process has its descriptor open.

    0        step, edition, parts, length of the description, place of the arrays, length of all; step 0: none
    64       the description, JSON: name, dtype, shape and place of each array; all other values
    ...      the arrays

An agent has two slots for copies and writes them in turn. So if the writer is killed, one of them is complete.

A command in a pause changes the state after a step that was already copied. So the copies of a step have editions:
hosts whose copies are of one version, which is the step with the edition, have the same state.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from mpitrain.arrays import Array, copy_to_host
from mpitrain.errors import CheckpointError, NoRoomError
from mpitrain.reading import json_of, parsed
from mpitrain.state.names import join
from mpitrain.state.tensors import NAMES

_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
# This much stays free, because a process never uses exactly as much memory as it asked for.
_SPARE_SHARE = 0.05


def check_room(num_bytes: int) -> None:
    """Refuse a copy of `num_bytes` if it would leave the machine or a control group of this process without memory.

    Raises:
        NoRoomError: the text gives the free and the needed memory.
    """
    for free, total, where in _limits():
        if num_bytes > free - _SPARE_SHARE * total:
            raise NoRoomError(
                f"it needs {num_bytes / 2**20:,.0f} MiB, but only {max(0, free) / 2**20:,.0f} MiB of the "
                f"{total / 2**20:,.0f} MiB of {where} are free, and {_SPARE_SHARE:.0%} must stay free"
            )


def _limits() -> list[tuple[int, int, str]]:
    """Free and total bytes of the machine, and of each control group with a limit (version 2)."""
    limits = []
    fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in _lines(_MEMORY) if len(line.split()) > 1}
    if "MemAvailable" in fields and "MemTotal" in fields:
        limits.append((fields["MemAvailable"], fields["MemTotal"], "this machine"))
    own = next((line[3:] for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), "")
    group = _GROUPS / own.lstrip("/")
    for folder in (group, *group.parents):
        most, used = _lines(folder / "memory.max"), _lines(folder / "memory.current")
        if most and used and most[0].isdecimal():
            stat = {
                name: int(value) for name, _, value in (line.partition(" ") for line in _lines(folder / "memory.stat"))
            }
            cached = stat.get("file", 0) - stat.get("shmem", 0)  # of files, which the kernel can drop
            limits.append((int(most[0]) - int(used[0]) + cached, int(most[0]), f"the control group {folder}"))
        if folder == _GROUPS:
            break
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


_ALIGNMENT = 64  # bytes: a line of the processor's cache
_BEGIN = 64  # of the description
_STEP, _EDITION, _PARTS, _DESCRIPTION_BYTES, _ARRAYS, _ALL_BYTES = _WORDS = range(6)
_GROWTH_BYTES = 1 << 12  # by which the description may grow without new memory
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Copy:
    """The content of a slot.

    Attributes:
        step: the number of steps made when it was taken.
        edition: from 0, among the copies of this step.
        parts: the number of ranks that keep a part of their own beside it; 0: none does.
        state: its arrays are CPU arrays that share no memory.
    """

    step: int
    edition: int
    parts: int
    state: dict[str, Any]


class MemorySlot:
    """Room for one copy.

    Attributes:
        descriptor: of the memory, for the process that keeps it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor` is that of an earlier slot, which is this object's from now on. None: make a slot."""
        self.descriptor = os.memfd_create("mpitrain-state") if descriptor is None else descriptor
        self._memory: mmap.mmap | None = None
        if size := os.fstat(self.descriptor).st_size:
            self._memory = mmap.mmap(self.descriptor, size)

    @property
    def step(self) -> int:
        """The step of the copy. 0: there is no complete copy."""
        return 0 if self._memory is None else int(self._header()[_STEP])

    @property
    def version(self) -> tuple[int, int]:
        """The step and the edition of the copy; see Copy. (0, 0): there is no whole copy."""
        return (self.step, int(self._header()[_EDITION])) if self.step else (0, 0)

    @property
    def parts(self) -> int:
        """The parts of the copy, if it is complete; see Copy."""
        return int(self._header()[_PARTS])

    def reserve(self, tensors: Mapping[str, Array], values: Mapping[str, Any]) -> None:
        """Allocate the memory for a copy of these, so that `write` does not wait for it. Growth loses the present copy.

        Raises:
            NoRoomError: there is not enough memory.
        """
        layout = _Layout(tensors, values)
        have = 0 if self._memory is None else len(self._memory)
        if layout.num_bytes <= have:
            return
        size = layout.num_bytes + _GROWTH_BYTES
        check_room(size - have)
        if self._memory is not None:
            self.clear()
        os.ftruncate(self.descriptor, size)
        os.posix_fallocate(self.descriptor, 0, size)
        self._memory = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def write(
        self, step: int, edition: int, parts: int, tensors: Mapping[str, Array], values: Mapping[str, Any]
    ) -> None:
        """Copy CPU or GPU arrays and other values, as `names.split` returns them. Until the end there is no copy.

        Raises:
            NoRoomError: see `reserve`.
        """
        self.reserve(tensors, values)
        assert self._memory is not None
        layout, header = _Layout(tensors, values), self._header()
        header[_STEP] = 0
        header[_EDITION:] = edition, parts, len(layout.description), layout.begin, layout.num_bytes
        self._memory[_BEGIN : _BEGIN + len(layout.description)] = layout.description
        for name, value in tensors.items():
            count = int(numpy.prod(value.shape, dtype=numpy.int64))
            place = layout.begin + layout.places[name]
            copy_to_host(value, numpy.frombuffer(self._memory, value.dtype, count, place).reshape(value.shape))
        header[_STEP] = step

    def clear(self) -> None:
        """Mark the slot as empty."""
        self._header()[_STEP] = 0

    def content(self) -> numpy.ndarray:
        """All bytes of a whole copy, for `read_copy`, here or on another host."""
        assert self._memory is not None
        return numpy.frombuffer(self._memory, numpy.uint8, int(self._header()[_ALL_BYTES]))

    def close(self) -> None:
        """Release the memory. The copy stays with the process that keeps it."""
        self._memory = None
        os.close(self.descriptor)

    def _header(self) -> numpy.ndarray:
        assert self._memory is not None
        return numpy.frombuffer(self._memory, numpy.uint64, len(_WORDS))


def read_copy(content: numpy.ndarray) -> Copy:
    """What the bytes of a whole copy hold. Its arrays are copies: the memory is written again.

    Raises:
        CheckpointError: the bytes are not a copy.
    """
    copy: Copy = parsed(lambda: _read(content), CheckpointError, "the copy of the state in memory", "is damaged")
    return copy


def _read(content: numpy.ndarray) -> Copy:
    step, edition, parts, length, begin, _ = content[: 8 * len(_WORDS)].view(numpy.uint64).tolist()
    text = content[_BEGIN : _BEGIN + length].tobytes()
    description = json_of(text, ValueError, "its description", any_text=True, any_number=True)
    flat = dict(description["values"])
    for name, kind, shape, place in description["arrays"]:
        dtype = _DTYPES[kind]
        num_bytes = dtype.itemsize * int(numpy.prod(shape, dtype=numpy.int64))
        flat[name] = content[begin + place : begin + place + num_bytes].copy().view(dtype).reshape(shape)
    return Copy(step, edition, parts, join(flat))


class _Layout:
    """The layout of a slot.

    Attributes:
        description: for the slot.
        begin: the place of the arrays.
        places: of each array, from there.
        num_bytes: of all.
    """

    def __init__(self, tensors: Mapping[str, Array], values: Mapping[str, Any]) -> None:
        arrays, end = [], 0
        self.places: dict[str, int] = {}
        for name, value in tensors.items():
            self.places[name] = end
            arrays.append([name, NAMES[value.dtype], list(value.shape), end])
            end = _aligned(end + value.nbytes)
        self.description = json.dumps({"values": values, "arrays": arrays}).encode()
        self.begin = _BEGIN + _aligned(len(self.description))
        self.num_bytes = self.begin + end


def _aligned(number: int) -> int:
    return -(-number // _ALIGNMENT) * _ALIGNMENT
