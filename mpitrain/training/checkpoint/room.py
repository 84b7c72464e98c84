"""How much memory this process may still take before the kernel kills a process for it."""

from __future__ import annotations

from pathlib import Path

from mpitrain.errors import MpitrainError

_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
# This much stays free, because a process never uses exactly the memory that it asked for.
_SPARE_SHARE = 0.05


class NoRoomError(MpitrainError):
    """There is not enough memory for a copy."""


def check_room(num_bytes: int) -> None:
    """Refuse a copy of `num_bytes` if it would leave the machine or a control group of this process without memory.

    Raises:
        NoRoomError: says what is free, and what is needed.
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
