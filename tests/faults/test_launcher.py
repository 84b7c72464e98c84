"""What happens to the launcher of a job, to what it starts, and to a job in which mt.run_on is used."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from faults.failing import HERE, START, launched, nightly, run
from faults.outcome import failed, succeeded
from jobs import REPOSITORY, VENVS, mpiexec, run_command, until
from mpitrain.launch.processes import command_line

WAITS = """
folder = pathlib.Path(sys.argv[1])
world.barrier()
(folder / 'in').touch()
while not (folder / 'go').exists():
    time.sleep(0.02)
world.print('done')
"""


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
        job = launched(tmp_path, START + WAITS, 2, words=(str(tmp_path),), during=during)
    finally:
        for descriptor in held:
            os.close(descriptor)
    succeeded(job)
    assert job.stdout == "[0] done\n"
    said = "mpitrain: another process holds the job's output open; the end of the output may be missing\n"
    assert job.stderr == said


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [20, 35])
def test_a_launcher_that_is_stopped_for_a_while(tmp_path: Path, seconds: int) -> None:
    """As by Ctrl-Z. On one machine the job continues. Another host's agent would give its launcher up after 30 s."""

    def during(launcher: subprocess.Popen[str]) -> None:
        until((tmp_path / "in").exists)
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(seconds)  # a host that is silent for 15 s is lost, also this one
        launcher.send_signal(signal.SIGCONT)
        (tmp_path / "go").touch()

    job = launched(tmp_path, START + WAITS, 2, words=(str(tmp_path),), during=during)
    succeeded(job)
    assert job.stdout == "[0] done\n"


@pytest.mark.nightly
def test_a_file_of_variables_that_names_a_device_that_is_not_here(tmp_path: Path) -> None:
    variables = tmp_path / "variables"
    variables.write_text("UCX_NET_DEVICES=nothere0\n")
    job = launched(tmp_path, "print('in')", 2, "--env-file", str(variables))
    failed(job, "UCX_NET_DEVICES names nothere0, which does not exist here")
    assert "in" not in job.stdout


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


@pytest.mark.parametrize("start", [run, *nightly(launched)])
def test_ranks_read_nothing_from_stdin(tmp_path: Path, start: object, vendor: str) -> None:
    """MPICH's mpiexec leaves the input of all ranks but the first open, Open MPI's that of the first."""
    job = run(2, READS, vendor) if start is run else launched(tmp_path, READS, 2, vendor=vendor)
    succeeded(job)
    assert str([(("", b"", b""),) * 2] * 2) in job.stdout, job.output


# -- mt.run_on -------------------------------------------------------------------------------------------------------

RUN_ON = """
import os, signal, time
import numpy
import mpitrain as mt

def fails(number):
    raise ValueError(f"{number} is not allowed")

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def stays(file):
    while not os.path.exists(file):
        time.sleep(0.01)
    return "it came back"

world = mt.init()
with mt.workers(world) as leads:
    if leads:
        BODY
print(f"rank {world.rank} continues")
"""


def test_an_error_that_is_not_caught_ends_the_job() -> None:
    ended = run(3, RUN_ON.replace("BODY", "mt.run_on(2, fails, 7).result()"))
    failed(ended)
    last_words = ended.stderr[ended.stderr.index("mpitrain: rank 0 on") :]
    assert f"RemoteError: rank 2 on {HERE}: fails raised ValueError: 7 is not allowed" in last_words
    assert "in fails\n" in last_words
    assert "rank 0 continues" not in ended.stdout


@pytest.mark.nightly
def test_what_cannot_come_back(tmp_path: Path) -> None:
    """A rank is killed while it computes; a function is one that not every rank defines."""
    ended = launched(tmp_path, RUN_ON.replace("BODY", "mt.run_on(1, dies).result()"), 3)
    failed(ended)
    how = r"(was killed by signal 9|ended without a message \(os\._exit, or killed\?\))"
    assert re.search(rf"^mpitrain: rank 1 on {HERE} {how}", ended.stderr, re.M), ended.output
    body = "def late(): pass\n        mt.run_on(1, late).result()"
    why = f"rank 1 on {HERE}: the function or an argument cannot be made there: AttributeError"
    failed(run(2, RUN_ON.replace("BODY", body)), why)


def test_a_function_that_does_not_come_back_is_reported_and_can_be_left(tmp_path: Path) -> None:
    """The limits of hangs do not end the job: the function may take long."""
    file = str(tmp_path / "come back")
    body = f"""
        future = mt.run_on(1, stays, {file!r})
        try:
            future.result(timeout_seconds=6)
        except TimeoutError as error:
            print("late:", error)
        open({file!r}, "w").close()
        print(future.result())
"""
    limits = {"MPITRAIN_STALL_SECONDS": "1", "MPITRAIN_HANG_SECONDS": "4"}
    ended = launched(tmp_path, RUN_ON.replace("BODY", body.strip()), 3, env=limits)
    succeeded(ended)
    assert re.search(rf"late: rank 0 on {HERE}: stays on rank 1 on {HERE} has not returned after 6 s", ended.stdout)
    assert "it came back" in ended.stdout
    report = next(line for line in ended.stderr.splitlines() if "no progress" in line and "rank 1 on" in line)
    assert re.search(rf"rank 0 on {HERE} waits in run_on, for stays on rank 1 on {HERE}", report), ended.output
    assert re.search(r"rank 1 on \S+ is in stays, for run_on, for which the others wait by design", report), (
        ended.output
    )
    assert re.search(r'File ".*script.py", line \d+ in stays', ended.stderr), ended.output


ENDS = """
import os, sys, time
import mpitrain as mt

def stays(file):
    open(file, "w").close()
    time.sleep(2)

world = mt.init()
try:
    with mt.workers(world) as leads:
        if leads:
            mt.run_on(1, stays, sys.argv[1])
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            raise KeyError
except KeyError:
    print("caught")
print(f"rank {world.rank} continues")
"""


@pytest.mark.nightly
def test_a_program_that_ends_after_the_error_of_its_body(tmp_path: Path) -> None:
    """A worker that is still busy hears of the end of the block when its function has ended."""
    ended = run(3, ENDS, "mpich", str(tmp_path / "began"))
    succeeded(ended)
    assert sorted(ended.stdout.splitlines()) == ["caught", *(f"rank {rank} continues" for rank in range(3))]


@pytest.mark.nightly
def test_matrix_powers() -> None:
    for ranks in (1, 2):
        command = [*mpiexec(ranks), str(VENVS["mpich"] / "bin/python"), "examples/matrix_powers.py"]
        ended = run_command([*command, "--size", "17", "--power", "3", "--rounds", "1"], cwd=REPOSITORY)
        succeeded(ended)
        first, second, *last = ended.stdout.splitlines()
        assert first == f"17 x 17, n = 3, {ranks} ranks, 1 nodes: the sum is equal on one place and on two"
        assert re.fullmatch(rf"one place \(rank 0\): .* ms; two \(rank 0, rank {ranks - 1}\): .* times as fast", second)
        assert len(last) == (ranks > 1)
        assert all(
            re.fullmatch(r"It pays from n = \d+ on: a multiplication takes .* there and back\.", line) for line in last
        )
