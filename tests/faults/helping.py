"""Shared by the tests of processes that multiprocessing starts: a script on several ranks, and a device."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import VENVS, Job, mpiexec, run_command

Script = Callable[..., Job]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run a source on so many ranks. The source is a file, like a user's script, because forkserver runs it again."""

    def run(ranks: int, source: str, vendor: str = "mpich") -> Job:
        (tmp_path / "script.py").write_text(source)
        python = str(VENVS[vendor] / "bin/python")
        return run_command([*mpiexec(ranks, vendor), python, str(tmp_path / "script.py")], timeout=300)

    return run


def a_device() -> str:
    """A character device that is neither memory nor a terminal. With O_PATH, a descriptor names the device unopened."""
    for path in sorted(Path("/dev").iterdir()):
        status = path.lstat()
        if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == 10:
            return str(path)
    pytest.skip("/dev has no device")
