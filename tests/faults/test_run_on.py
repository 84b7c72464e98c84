"""mt.run_on in jobs with faults: what is printed, how the job ends, what is left."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

from faults.outcome import failed, succeeded
from jobs import REPOSITORY, VENVS, Job, mpiexec, run_command, run_job

HOST = re.escape(socket.gethostname())

START = """
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
print(f"rank {world.rank} goes on")
"""


def job(body: str, folder: Path, *options: str, **env: str) -> Job:
    """Under `mpitrain run`, on 3 ranks."""
    script = folder / "script.py"
    script.write_text(START.replace("BODY", body))
    command = [sys.executable, "-m", "mpitrain", "run", "-n", "3", *options, str(script)]
    return run_command(command, env=env)


def test_an_error_that_is_not_caught_ends_the_job() -> None:
    ended = run_job(3, START.replace("BODY", "mt.run_on(2, fails, 7).result()"))
    failed(ended)
    last_words = ended.stderr[ended.stderr.index("mpitrain: rank 0 on") :]
    assert f"RemoteError: rank 2 on {socket.gethostname()}: fails raised ValueError: 7 is not allowed" in last_words
    assert "in fails\n" in last_words
    assert "goes on" not in ended.stdout.replace("rank 1 goes on", "").replace("rank 2 goes on", "")


def test_a_rank_that_is_killed_while_it_computes(tmp_path: Path) -> None:
    ended = job("mt.run_on(1, dies).result()", tmp_path)
    failed(ended)
    how = r"(was killed by signal 9|ended without a word \(os\._exit, or killed\?\))"
    assert re.search(rf"^mpitrain: rank 1 on {HOST} {how}", ended.stderr, re.M), ended.output


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
    ended = job(body.strip(), tmp_path, MPITRAIN_STALL_SECONDS="1", MPITRAIN_HANG_SECONDS="4")
    succeeded(ended)
    assert re.search(rf"late: rank 0 on {HOST}: stays on rank 1 on {HOST} has not come back after 6 s", ended.stdout)
    assert "it came back" in ended.stdout
    report = next(line for line in ended.stderr.splitlines() if "no progress" in line and "rank 1 on" in line)
    assert re.search(rf"rank 0 on {HOST} waits in run_on, for stays on rank 1 on {HOST}", report), ended.output
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
print(f"rank {world.rank} goes on")
"""


def test_a_program_that_ends_after_the_error_of_its_body(tmp_path: Path) -> None:
    """A worker that is still busy hears of the end of the block when its function has ended."""
    ended = run_job(3, ENDS, str(tmp_path / "began"))
    succeeded(ended)
    assert sorted(ended.stdout.splitlines()) == ["caught", *(f"rank {rank} goes on" for rank in range(3))]


def test_functions_of_the_script_that_not_every_rank_defines() -> None:
    body = "def late(): pass\n        mt.run_on(1, late).result()"
    ended = run_job(2, START.replace("BODY", body))
    failed(ended)
    assert re.search(
        rf"rank 1 on {HOST}: the function or an argument cannot be made there: AttributeError", ended.stderr
    )


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
