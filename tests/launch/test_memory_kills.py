"""The message about an out-of-memory kill, from each place where the kernel reports one.

tests/faults/test_exits.py has a real kill.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpitrain.launch import memory_kills
from mpitrain.launch.memory_kills import MemoryKills

LINE = "Memory cgroup out of memory: Killed process {} (python) total-vm:8kB, anon-rss:4kB"
MINE = os.getpid()


class Kernel:
    """Files that stand for the kernel's own."""

    def __init__(self, folder: Path) -> None:
        self.group, self.vmstat = folder / "memory.events", folder / "vmstat"
        self.log: list[str] | None = None
        self.journal: list[str] = []
        self.write(self.group, 0)
        self.write(self.vmstat, 3)

    def write(self, path: Path, count: int) -> None:
        path.write_text(f"oom_group_kill 7\noom_kill {count}\nother 1\n")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel that has counted no kills in the group of any process, and 3 in all. Its log cannot be read."""
    kernel = Kernel(tmp_path)
    monkeypatch.setattr(memory_kills, "_VMSTAT", str(kernel.vmstat))
    monkeypatch.setattr(memory_kills, "_FIRST_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)
    monkeypatch.setattr(memory_kills, "_counters", lambda _: iter([f"{tmp_path}/nothing", str(kernel.group)]))
    monkeypatch.setattr(memory_kills, "_open_log", lambda: None if kernel.log is None else 0)
    monkeypatch.setattr(memory_kills, "_records", lambda _: [kernel.log.pop(0) for _ in list(kernel.log or [])])
    monkeypatch.setattr(memory_kills, "_journal", lambda _: kernel.journal)
    return kernel


def watching() -> MemoryKills:
    kills = MemoryKills()
    kills.watch(MINE)
    return kills


SAID = f'the kernel killed it for want of memory: "{LINE.format(MINE)}"'


def rose(path: Path, before: int, after: int) -> str:
    return f"the kernel may have killed it for want of memory: oom_kill in {path} rose from {before} to {after}"


def test_nothing_was_killed(kernel: Kernel) -> None:
    kernel.log = [LINE.format(MINE)]  # the kill of an earlier process with that number: no counter has risen
    assert watching().words(MINE) == ""


@pytest.mark.parametrize("place", ["log", "journal"])
def test_the_kernels_own_words(kernel: Kernel, place: str) -> None:
    setattr(kernel, place, [])
    kills = watching()
    setattr(kernel, place, ["something else", LINE.format(f"{MINE}0"), LINE.format(MINE)])
    kernel.write(kernel.group, 1)
    assert [kills.words(MINE) for _ in range(2)] == [SAID] * 2  # also at the second question


@pytest.mark.parametrize("is_container", [False, True])
def test_the_log_speaks_of_another_process(kernel: Kernel, is_container: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the numbers of the log are others."""
    if is_container:
        monkeypatch.setattr(memory_kills, "_FIRST_NAMESPACE", 1)
    kernel.log = [LINE.format(MINE if is_container else f"{MINE}0")]
    kills = watching()
    kernel.write(kernel.group, 1)
    assert kills.words(MINE) == (rose(kernel.group, 0, 1) if is_container else "")


def test_a_kill_elsewhere_on_the_machine(kernel: Kernel) -> None:
    kills = watching()
    kernel.write(kernel.vmstat, 5)
    assert kills.words(MINE) == ""
    kernel.group.unlink()
    kills = watching()
    kernel.write(kernel.vmstat, 6)
    assert kills.words(MINE) == rose(kernel.vmstat, 5, 6)


def test_the_group_goes_as_that_of_a_session_with_its_last_process(kernel: Kernel) -> None:
    kills = watching()
    kernel.write(kernel.group, 1)
    assert kills.words(MINE) == rose(kernel.group, 0, 1)
    kernel.group.unlink()
    assert kills.words(MINE) == rose(kernel.group, 0, 1)
    kernel.write(kernel.group, 0)
    kills = watching()
    kernel.group.unlink()  # before anybody asks: the log and the machine's counter are read
    assert kills.words(MINE) == ""
    kernel.write(kernel.vmstat, 4)
    assert kills.words(MINE) == rose(kernel.vmstat, 3, 4)
    kernel.journal = [LINE.format(MINE)]
    assert kills.words(MINE) == SAID


def test_where_nothing_can_be_read(kernel: Kernel) -> None:
    kernel.group.unlink()
    kernel.vmstat.unlink()
    hint = "by somebody's kill -9, or by the kernel for want of memory (`sudo dmesg | grep -i 'killed process'`)"
    assert watching().words(MINE) == hint


def test_this_machines_own_counters() -> None:
    assert watching().words(MINE) == ""
