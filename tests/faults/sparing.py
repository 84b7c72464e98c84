"""Shared by the tests of spares: a training that waits to be killed, and its processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from faults.restarting import SCRIPT
from jobs import TOKEN, VENVS, Job, run_command, until

# Variables that mpiexec gives to a rank, and that a spare does not have.
RANK = {b"PMI_RANK", b"OMPI_COMM_WORLD_RANK"}

# Every process, rank or spare, leaves a file with its number before init(). A rank leaves another one after init().
BEFORE_INIT = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
print("begins")
(folder / f"began-{os.getpid()}").touch()
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)
def restarted():  # the training runs, and nobody has let it go on yet
    return (folder / "trains").exists() and not (folder / "killed").exists()
"""
AFTER_INIT = "(folder / f'rank-{rank}-{os.getpid()}').touch()"
# A training rank waits at step 7 until the test lets it go on, and is killed there.
KILL = """if rank == 1 and step == {step} and once("kill-{step}"):
        once("trains")
        wait_for("go-{step}")
        (folder / "killed").touch()
        kill()
"""


def train(
    folder: Path,
    wrong: str,
    *options: str,
    ranks: int = 2,
    at_start: str = "",
    vendor: str = "mpich",
    during: Callable[[subprocess.Popen[str], Callable[[str], bool]], None] | None = None,
) -> Job:
    """Run the training of restarting.py with spares. `during` gets a function that is true if stderr has a text."""
    folder.mkdir(exist_ok=True)
    body = SCRIPT.replace("BEFORE", AFTER_INIT).replace("WRONG", wrong)
    (folder / "train.py").write_text(BEFORE_INIT + at_start + body)
    errors = folder / "stderr"
    errors.touch()
    command = [str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "-n", str(ranks)]
    command += ["--restarts", "2", "--spares", *options, str(folder / "train.py"), str(folder)]
    # With `exec`, a signal to the process goes to the launcher.
    job = run_command(
        ["sh", "-c", 'exec "$@" 2> "$0"', str(errors), *command],
        cwd=folder,
        env={"MPITRAIN_MEMORY_STEPS": "1"},
        during=None if during is None else lambda process: during(process, lambda text: text in errors.read_text()),
    )
    return Job(job.code, job.stdout, errors.read_text(), job.left)


def spares(token: str) -> list[int]:
    """The processes of the job with this token of tests/jobs.py that are still spares."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            names = {variable.partition(b"=")[0] for variable in variables}
            if f"{TOKEN}={token}".encode() in variables and b"_MPITRAIN_SPARE" in names and not RANK & names:
                found.append(int(entry.name))
    return found


def token_of(process: subprocess.Popen[str]) -> str:
    """The token of a started job."""
    variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return next(v.partition(b"=")[2].decode() for v in variables if v.startswith(f"{TOKEN}=".encode()))


def let_go(folder: Path, *steps: int) -> Callable[[subprocess.Popen[str], Callable[[str], bool]], None]:
    """Let the training kill ranks at these steps, each time when all spares are ready."""

    def during(_: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        for number, step in enumerate(steps, start=1):
            until(lambda number=number: (folder / "stderr").read_text().count("2 spares are ready") == number)
            (folder / f"go-{step}").touch()

    return during


def ranks(folder: Path) -> set[int]:
    """The processes that were ranks."""
    return {int(path.name.split("-")[2]) for path in folder.glob("rank-*")}


def stubs(token: str) -> list[int]:
    """The stubs of a job of tests/jobs.py."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found += [int(entry.name)] * ((entry / "cmdline").read_bytes().split(b"\0")[1:3] == [b"-I", b"-S"])
    return found
