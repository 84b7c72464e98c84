"""What happens to the launcher of a job: nobody reads its output, somebody holds the output open, it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.conftest import need
from faults.outcome import succeeded
from jobs import VENVS, Job, mpiexec, run_command, until
from mpitrain.launch.processes import command_line

RUN = [sys.executable, "-m", "mpitrain", "run", "-n", "2"]
START = """
import os, pathlib, sys, time
import mpitrain as mt
world = mt.init()
folder = pathlib.Path(sys.argv[1])
world.barrier()
"""
WAITS = "(folder / 'in').touch()\nwhile not (folder / 'go').exists():\n    time.sleep(0.02)\nworld.print('done')\n"


def script(folder: Path, source: str) -> list[str]:
    path = folder / "script.py"
    path.write_text(START + source)
    return [str(path), str(folder)]


def test_an_output_that_nobody_reads_any_more(tmp_path: Path) -> None:
    """As with `mpitrain run ... | head -1`. All processes of the job end."""
    words = script(tmp_path, "while True:\n    world.print('again')\n    world.barrier()")
    shell = '"$@" | head -1; echo "code ${PIPESTATUS[0]}"'
    job = run_command(["bash", "-c", shell, "sh", *RUN, *words])
    said, code = job.stdout.splitlines()
    assert said == "[0] again"
    assert code != "code 0"
    assert job.left == []


def mpiexec_of(launcher: subprocess.Popen[str]) -> int:
    """The process of mpiexec below a launcher."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (mpiexec,) = [int(pid) for pid in children if "mpiexec" in command_line(int(pid)).split()[0]]
    return mpiexec


def test_an_output_that_another_process_holds_open(tmp_path: Path) -> None:
    """The launcher cannot know whether more would come. It waits a while, and says what it does not know."""
    held: list[int] = []

    def during(launcher: subprocess.Popen[str]) -> None:
        until((tmp_path / "in").exists)
        held.append(os.open(f"/proc/{mpiexec_of(launcher)}/fd/1", os.O_WRONLY))
        (tmp_path / "go").touch()

    try:
        job = run_command([*RUN, *script(tmp_path, WAITS)], during=during)
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert job.code == 0, job.output
    assert job.stdout == "[0] done\n"
    assert job.stderr == (
        "mpitrain: another process holds the job's output open; the end of the output may be missing\n"
    )
    assert job.left == []


@pytest.mark.parametrize("seconds", [20, pytest.param(35, marks=pytest.mark.nightly)])
def test_a_launcher_that_is_stopped_for_a_while(tmp_path: Path, seconds: int) -> None:
    """As by Ctrl-Z. On one machine the job goes on. A guard of another host would give its launcher up after 30 s."""

    def during(launcher: subprocess.Popen[str]) -> None:
        until((tmp_path / "in").exists)
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(seconds)  # a host that is silent for 15 s is lost, also this one
        launcher.send_signal(signal.SIGCONT)
        (tmp_path / "go").touch()

    job = run_command([*RUN, *script(tmp_path, WAITS)], during=during)
    succeeded(job)
    assert job.stdout == "[0] done\n"


def run_with(folder: Path, *options: str) -> Job:
    python = str(VENVS["mpich"] / "bin/python")
    return run_command([python, "-m", "mpitrain", "run", *options, *script(folder, "(folder / 'in').touch()")])


def test_a_file_of_variables_that_names_a_device_that_is_not_here(tmp_path: Path) -> None:
    variables = tmp_path / "variables"
    variables.write_text("UCX_NET_DEVICES=nothere0\n")
    job = run_with(tmp_path, "-n", "2", "--env-file", str(variables))
    assert job.code != 0
    assert "UCX_NET_DEVICES names nothere0, which does not exist here" in job.stderr, job.output
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("-n", "1", "--servers", "1"), "1 ranks, 1 of them servers, leave none for workers; start at least 2"),
        (("-n", "2", "--servers", "1", "--restarts", "1"), "--servers goes without --restarts, --spares and --recover"),
    ],
)
def test_servers_that_would_serve_nobody(tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    job = run_with(tmp_path, *options)
    assert job.code == 2, job.output
    assert why in job.stderr, job.output
    assert not (tmp_path / "in").exists()


READS = """
import os, subprocess, sys
import mpitrain as mt

def read():
    try:
        return input()
    except EOFError:
        return sys.stdin.read(), os.read(0, 9), subprocess.run("cat", capture_output=True, check=True).stdout

before, world = read(), mt.init()
world.print(world.allgather((before, read())))
"""


@pytest.mark.parametrize("start", ["mpitrain run, mpich", "mpitrain run, openmpi", "mpiexec"])
def test_ranks_read_nothing_from_stdin(tmp_path: Path, start: str) -> None:
    """MPICH's mpiexec leaves the input of all ranks but the first open, Open MPI's that of the first."""
    vendor = need("openmpi") if "openmpi" in start else "mpich"
    python = str(VENVS[vendor] / "bin/python")
    path = tmp_path / "script.py"
    path.write_text(READS)
    words = [*mpiexec(2), python] if start == "mpiexec" else [python, "-m", "mpitrain", "run", "-n", "2"]
    job = run_command([*words, str(path)])
    succeeded(job)
    assert str([(("", b"", b""),) * 2] * 2) in job.stdout, job.output
