"""Whether the kernel killed a process of this host because memory ran out: from the kernel's log, or its counters.

The kernel's log names each process that its out-of-memory killer ends, but on many systems only root may read the log
(dmesg_restrict of proc(5)). All users may read the counters: `oom_kill` of a control group (memory.events, or
memory.oom_control of version 1) counts the processes of that group, and that of /proc/vmstat those of the machine.

Sent to the agents as text. So this module imports no other module of mpitrain, and must run with old Pythons.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

# The first words of the message when the kernel's log names the process.
KERNEL_KILLED = "the kernel killed it"

_LOG = "/dev/kmsg"
_VMSTAT = "/proc/vmstat"
_GROUPS = "/sys/fs/cgroup"
# The inode of the first process namespace (include/linux/proc_ns.h): in other namespaces the log has other numbers.
_FIRST_NAMESPACE = 0xEFFFFFFC
_JOURNAL_SECONDS = 5.0
# Docker's default, which is too small for many ranks; and what a write to a full one may still find.
_SMALL_SHM_BYTES, _FULL_SHM_BYTES = 64 * 2**20, 2**20
_RECORD_BYTES = 8192


class MemoryKills:
    """The kills since this object was made."""

    def __init__(self) -> None:
        self._since = time.time()
        self._log = _open_log()
        self._lines: list[str] = []  # lines of the log, as far as read
        self._counted: dict[str, int] = {}
        self._risen: dict[str, int] = {}  # the counters, as last read
        self._groups: dict[int, str] = {}  # by process: the file with its group's counter
        self._count(_VMSTAT)

    def watch(self, pid: int) -> None:
        """Note the counter of the control group in which this process is now, alive. It may have come there later."""
        group = next((path for path in _counters(pid) if Path(path).exists()), "")
        if pid not in self._groups or (group and "//" not in group):  # "//": one that has just ended is in the root
            self._groups[pid] = group
            self._count(group)

    def words(self, pid: int) -> str:
        """Return what the kernel says about the end of this process; empty if the kernel did not kill it."""
        has_numbers = Path("/proc/self/ns/pid").stat().st_ino == _FIRST_NAMESPACE
        counters = [path for path in (self._groups.get(pid, ""), _VMSTAT) if path in self._counted]
        counts = {path: _read_counter(path) for path in counters}
        self._risen.update((path, count) for path, count in counts.items() if count > self._counted[path])
        # A group may vanish with its last process. The last counter read before stays valid; without one, say nothing.
        counters = [path for path in counters if path in self._risen or counts[path] >= 0]
        if counters and counters[0] not in self._risen:
            return ""
        if has_numbers:
            self._lines += _journal(self._since) if self._log is None else _records(self._log)
        if line := next((line for line in self._lines if re.search(rf"Killed process {pid}\b", line)), ""):
            return f'{KERNEL_KILLED} for want of memory: "{line}"'
        if self._log is not None and has_numbers:
            return ""
        if not counters:
            return (
                "by somebody's kill -9, or by the kernel for want of memory (`sudo dmesg | grep -i 'killed process'`)"
            )
        # The kernel may have killed another process of the group, such as a worker of a DataLoader.
        rose = f"oom_kill in {counters[0]} rose from {self._counted[counters[0]]} to {self._risen[counters[0]]}"
        return f"the kernel may have killed it for want of memory: {rose}"

    def _count(self, path: str) -> None:
        count = _read_counter(path)
        if count >= 0:
            self._counted.setdefault(path, count)


def why_bus_error() -> str:
    """Return what may have ended a process by SIGBUS: a small or full /dev/shm, where MPI keeps memory; empty: it is
    neither."""
    try:
        place = os.statvfs("/dev/shm")
    except OSError:
        return ""
    size, free = place.f_blocks * place.f_frsize, place.f_bavail * place.f_frsize
    if size > _SMALL_SHM_BYTES and free >= _FULL_SHM_BYTES:
        return ""
    return (
        f"/dev/shm, in which MPI keeps memory, may be too small: it has {size / 2**20:.0f} MiB, {free / 2**20:.0f} MiB "
        "of them free; `sudo mount -o remount,size=50% /dev/shm`, or for a container `docker run --shm-size=8g`"
    )


def _open_log() -> int | None:
    """Open the kernel's log at its present end; None if this user may not read it."""
    try:
        log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(log, 0, os.SEEK_END)
        os.read(log, _RECORD_BYTES)
    except BlockingIOError:  # nothing new, as expected
        return log
    except OSError:
        return None
    return log


def _records(log: int) -> Iterator[str]:
    """Return the new records: each read gives one, "6,1234,98765,-;text" and lines with details."""
    while True:
        try:
            record = os.read(log, _RECORD_BYTES)
        except BrokenPipeError:  # old records were overwritten; the next read gives the oldest one left
            continue
        except OSError:
            return
        yield record.decode(errors="replace").partition(";")[2].partition("\n")[0].strip()


def _journal(since: float) -> list[str]:
    """Read the kernel's log from systemd's journal, which the members of some groups may read."""
    command = ["journalctl", "-k", "-q", "-o", "cat", "--no-pager", f"--since=@{since:.0f}"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        quiet = subprocess.DEVNULL
        done = subprocess.run(
            command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, timeout=_JOURNAL_SECONDS, check=False
        )
        return done.stdout.decode(errors="replace").splitlines()
    return []


def _counters(pid: int) -> Iterator[str]:
    """Return where the counter of a process's control group may be: "4:memory:/a/b" of version 1, "0::/a/b" of 2."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield f"{_GROUPS}/memory{path}/memory.oom_control"
        elif not controllers:
            yield f"{_GROUPS}{path}/memory.events"


def _read_counter(path: str) -> int:
    """Return the counter; -1: there is none."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError):
        return -1
    line = re.search(r"^oom_kill (\d+)$", text, re.M)
    return int(line[1]) if line else -1
