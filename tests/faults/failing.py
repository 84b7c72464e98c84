"""Shared by the tests of failing jobs: how a source is run, the beginnings of scripts, what the other ranks do."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from faults.conftest import need
from jobs import VENVS, Job, run_command, run_job, without_restarts

HERE = socket.gethostname()
KILL = "os.kill(os.getpid(), signal.SIGKILL)"

START = """
import atexit, os, pathlib, signal, subprocess, sys, threading, time
import numpy
import mpitrain as mt

world = mt.init()
rank = world.rank
"""

# Functions by which a script fails once: in the try of the job that comes to the place first. The script has a
# `folder`, and has imported os and signal. `once` is true at the first call with a name, in any try.
DYING = """
def once(name):
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""

BOTH = pytest.mark.parametrize("vendor", ["mpich", "openmpi"], indirect=True)
ONLY_OPENMPI = pytest.mark.parametrize("vendor", ["openmpi"], indirect=True)

# What the other ranks do while one fails.
OTHERS = {
    "mean": "while True: world.mean(numpy.ones(5))",
    "mean of a ring": "world.mean(numpy.ones(2**20))",
    "barrier": "world.barrier()",
    "broadcast": "world.broadcast_object('x', root=1)",
    "receive": "world.recv(1)",
    "send": "world.send(numpy.ones(2**20), 1)",
    "reducer": "reducer.begin(1); reducer.ready(0, numpy.ones(3)); reducer.finish()",
    "alone": "time.sleep(1000)",
    "finished": "sys.exit(0)",
}
REDUCER = "reducer = mt.GradientReducer(world, [mt.Parameter('w', (3,), numpy.dtype('float64'))])\n"


def others_and(rank: int, ending: str, doing: str) -> str:
    """Rank `rank` ends shortly after all the others have begun to do something."""
    return f"{START}{REDUCER}if rank == {rank}:\n    time.sleep(0.3)\n    {ending}\nelse:\n    {OTHERS[doing]}\n"


def nightly(*rows: Any) -> list[Any]:
    """These rows of a table, or single values, for the nightly tests."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.nightly) for row in rows]


def run(ranks: int, source: str, vendor: str = "mpich", *words: str, **how: Any) -> Job:
    """A source under mpiexec alone."""
    return run_job(ranks, source, *words, launcher=need(vendor), python=vendor, **how)


def launched(
    folder: Path, source: str, ranks: int, *options: str, words: tuple[str, ...] = (), vendor: str = "mpich", **how: Any
) -> Job:
    """A source under `mpitrain run`. It is a file, like a user's script."""
    (folder / "script.py").write_text(source)
    command = [str(VENVS[need(vendor)] / "bin/python"), "-m", "mpitrain", "run", "-n", str(ranks)]
    command += without_restarts(options) if "--recover" in options else options
    return run_command([*command, str(folder / "script.py"), *words], **how)


def a_device() -> str:
    """A character device that is neither memory nor a terminal. With O_PATH, a descriptor names the device unopened."""
    for path in sorted(Path("/dev").iterdir()):
        status = path.lstat()
        if stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) == 10:
            return str(path)
    pytest.skip("/dev has no device")
