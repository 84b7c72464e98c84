"""How busy a host is: its cores, memory, network and disks from /proc, and its GPUs.

Sent to the guards as text. So this module imports only what is sent with it, and must run with old Pythons.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mpitrain.launch.gpu_load import GpuLoad

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
        """Return the load, with the fields that docs/live.md describes; None: the last reading is too young.

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
        """Ask the GPUs no more."""
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
