"""How busy a host is: its cores, memory, network and disks from /proc, and its GPUs by the driver's own library (NVML).

A driver may take long to answer, or hang. So a thread asks it, and the others read the latest answers.

Sent to the agents as text. So this module imports no other module of mpitrain, and must run with old Pythons. The
bindings of training/meters.py are not installed for the Python of an agent.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_GPU_SECONDS = 1.0
# A driver that has not answered for longer hangs. Its last answer is out of date.
_OLD_GPU_SECONDS = 5.0
_MOST_GPUS = 64


class _Utilisation(ctypes.Structure):
    """nvmlUtilization_t: per cent of the last sampling period."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _GpuMemory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class GpuLoad:
    """The load of all GPUs that the driver shows. A thread asks from `read` to `end`.

    While a driver hangs, no other thread asks it: also the next reader waits for this answer.
    """

    _asking: threading.Thread | None = None  # of all objects

    def __init__(self) -> None:
        self._answers: list[dict[str, Any]] = []
        self._answered = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def read(self) -> list[dict[str, Any]]:
        """Return for each GPU the share of time in which a kernel ran, and its memory.

        [] if the driver has not answered for 5 s.
        """
        if self._thread is None and (GpuLoad._asking is None or not GpuLoad._asking.is_alive()):
            self._thread = GpuLoad._asking = threading.Thread(target=self._ask, name="GPUs", daemon=True)
            self._thread.start()
        return self._answers if time.monotonic() - self._answered < _OLD_GPU_SECONDS else []

    def end(self) -> None:
        """Let the thread end. Does not wait for it."""
        self._stop.set()

    def _ask(self) -> None:
        try:
            nvml = ctypes.CDLL(_LIBRARY)
        except OSError:  # no driver
            return
        if nvml.nvmlInit_v2() != 0:
            return
        number = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) != 0:
            return
        handles = []
        for place in range(min(number.value, _MOST_GPUS)):
            handle = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(handle)) == 0:
                handles.append(handle)
        while not self._stop.wait(_GPU_SECONDS if self._answers else 0.0) and handles:
            self._answers = [_state(nvml, handle) for handle in handles]
            self._answered = time.monotonic()
        nvml.nvmlShutdown()


def _state(nvml: Any, handle: ctypes.c_void_p) -> dict[str, Any]:
    """Return what one GPU does. What it does not tell, as a slice of a GPU does not, is None."""
    used, memory = _Utilisation(), _GpuMemory()
    has_used = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(used)) == 0
    has_memory = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    return {
        "busy": used.gpu / 100 if has_used else None,
        "memory_bytes": memory.total if has_memory else None,
        "memory_used_bytes": memory.used if has_memory else None,
    }


_PROC, _SYS = Path("/proc"), Path("/sys")
# Between two readings. Rates of a shorter time would jump; the kernel counts the time of cores in steps of 10 ms.
_SECONDS = 0.9
# After a longer time without a reading, rates would tell of the past.
_OLD_SECONDS = 5.0
_SECTOR_BYTES = 512  # in /proc/diskstats, whatever the disk's own are
# Disks that are made of others, or of memory, would count twice or are no disks.
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md")


class Load:
    """The load of this host, from one reading to the next."""

    def __init__(self, proc: Path = _PROC, sys: Path = _SYS) -> None:
        """Read nothing yet. A test gives other folders than /proc and /sys."""
        self._proc, self._sys = proc, sys
        self._read_at = 0.0
        self._before: dict[str, Any] = {}
        self._gpus = GpuLoad()

    def read(self, now: float) -> dict[str, Any] | None:
        """Return the load, with the fields of the live status protocol; None: the last reading is too young.

        Rates are means since the last reading. The first reading has none; they are None. So is what the kernel of
        this host does not tell.
        """
        took = now - self._read_at
        if self._read_at and took < _SECONDS:
            return None
        before = self._before if self._read_at and took < _OLD_SECONDS else {}
        counts = {**self._cores(), **self._network(), **self._disks()}
        self._before, self._read_at = counts, now

        def rate(name: str, scale: float = 1.0) -> float | None:
            if name not in before or name not in counts:
                return None
            return max(0.0, float(counts[name] - before[name])) / scale

        ticks = rate("ticks")
        busy = rate("busy_ticks", ticks) if ticks else None
        disks = [rate(name, took * 1000.0) or 0.0 for name in counts if name.startswith("disk ")]
        return {
            "cores": os.cpu_count(),
            "busy": _share(busy),
            **self._memory(),
            "received_bytes_per_second": _whole(rate("received", took)),
            "sent_bytes_per_second": _whole(rate("sent", took)),
            "read_bytes_per_second": _whole(rate("read", took)),
            "written_bytes_per_second": _whole(rate("written", took)),
            "disk_busy": _share(max(disks)) if disks and before else None,
            "gpus": self._gpus.read(),
        }

    def end(self) -> None:
        """Stop asking the GPUs."""
        self._gpus.end()

    def _cores(self) -> dict[str, float]:
        """Return the ticks of all cores since the start, and those in which they did something."""
        words = _text(self._proc / "stat").partition("\n")[0].split()
        if len(words) < 9 or words[0] != "cpu":
            return {}
        ticks = [int(word) for word in words[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
        return {"ticks": sum(ticks), "busy_ticks": sum(ticks) - ticks[3] - ticks[4]}

    def _memory(self) -> dict[str, int | None]:
        lines = (line.split() for line in _text(self._proc / "meminfo").splitlines())
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
        total, free = sizes.get("MemTotal:"), sizes.get("MemAvailable:")
        used = None if total is None or free is None else total - free
        return {"memory_bytes": total, "memory_used_bytes": used}

    def _network(self) -> dict[str, float]:
        """Return the bytes of the interfaces. Where none is a device, as in a container, those of all but lo."""
        rows = {}
        for line in _text(self._proc / "net/dev").splitlines():
            name, colon, rest = line.partition(":")
            numbers = rest.split()
            if colon and len(numbers) >= 9 and name.strip() != "lo":
                rows[name.strip()] = int(numbers[0]), int(numbers[8])
        devices = [name for name in rows if (self._sys / "class/net" / name / "device").exists()]
        counted = [rows[name] for name in devices or rows]
        return {"received": sum(row[0] for row in counted), "sent": sum(row[1] for row in counted)} if counted else {}

    def _disks(self) -> dict[str, float]:
        """Return the bytes of all disks, without their parts, and the milliseconds in which each was busy."""
        counts: dict[str, float] = {}
        for line in _text(self._proc / "diskstats").splitlines():
            words = line.split()
            if len(words) < 13 or words[2].startswith(_NO_DISKS) or not (self._sys / "block" / words[2]).exists():
                continue
            counts["read"] = counts.get("read", 0) + int(words[5]) * _SECTOR_BYTES
            counts["written"] = counts.get("written", 0) + int(words[9]) * _SECTOR_BYTES
            counts[f"disk {words[2]}"] = int(words[12])
        return counts


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")  # an interface may have any bytes in its name
    except OSError:
        return ""


def _share(value: float | None) -> float | None:
    return None if value is None else round(min(1.0, value), 3)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
