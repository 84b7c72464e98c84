"""How a process has ended, by the kernel's word: before its parent has asked for that, and after."""

from __future__ import annotations

import subprocess

import pytest

from jobs import KERNEL_KEEPS_CODES, until
from mpitrain.watching.census import WatchedProcess, is_readable, open_process

FORGETS = pytest.mark.skipif(not KERNEL_KEEPS_CODES, reason="this kernel tells an exit code once; Linux 6.15 keeps it")


@pytest.mark.parametrize("is_late", [False, pytest.param(True, marks=FORGETS)])
@pytest.mark.parametrize(("end", "code"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", -9)])
def test_an_exit_code(end: str, code: int, is_late: bool) -> None:
    with subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE) as child:
        descriptor = open_process(child.pid)
        assert descriptor is not None
        process = WatchedProcess(child.pid, descriptor)
        assert child.stdin is not None
        child.stdin.close()
        until(lambda: is_readable(descriptor))
        if is_late:
            child.wait()
        process.note_code()
    assert process.code == code
