"""`mpitrain run`: exit code 0 means that all ranks reached their end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.failing import MOSTLY_MPICH, START, others_and
from faults.outcome import failed, succeeded
from jobs import KERNEL_KEEPS_CODES, VENVS, Job, mpiexec, run_command

Run = Callable[..., Job]


@pytest.fixture
def run(vendor: str, tmp_path: Path) -> Run:
    """`mpitrain run -n 3` of a source. It must leave no temporary file."""

    def started(source: str) -> Job:
        path, temporary = tmp_path / "script.py", tmp_path / "temporary"
        path.write_text(source)
        temporary.mkdir()
        command = [str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "-n", "3", str(path)]
        job = run_command(command, env={"TMPDIR": str(temporary)})
        left = list(temporary.iterdir())
        assert left == [], job.output
        return job

    return started


SILENT = " ended without a word (os._exit, or killed?)"
GOES_ON = ", and mpiexec goes on: the job is ended\n"
HOLDER = "import subprocess; subprocess.Popen(['sleep', '1000'], close_fds=False)"  # has all open files of the rank


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_rank_that_vanishes_while_the_others_wait(ending: str, run: Run) -> None:
    job = run(others_and(1, ending, "barrier"))
    failed(job)
    how = r"was killed by signal 9|left with exit code \d+" + "|" + re.escape(SILENT.strip())
    assert re.search(rf"mpitrain: rank 1 on \S+ ({how}); mpiexec ended the others\n$", job.stderr), job.output
    if KERNEL_KEEPS_CODES:  # MPICH's mpiexec may name another rank, which it has killed
        assert job.code == (137 if "kill" in ending else 1), job.output


def test_a_rank_that_vanishes_when_the_others_are_done(run: Run) -> None:
    job = run(others_and(1, "os._exit(0)", "finished"))
    # MPICH's mpiexec sometimes does not notice the end of the rank. The guard then does.
    failed(job)
    assert re.search(rf"mpitrain: rank 1( on \S+)?{re.escape(SILENT)}(\n|{GOES_ON})", job.stderr), job.output


DIES = "(time.sleep(1), os.kill(os.getpid(), signal.SIGKILL))"
AT_ITS_END = {
    "alone": f"threading.Thread(target=lambda: {DIES}, daemon=True).start()",
    "finished": f"import mpitrain.waiting.notes as its; its.Notes.begin_barrier = lambda notes: {DIES}",
}


@pytest.mark.parametrize("doing", AT_ITS_END)
def test_a_rank_that_is_killed_while_it_waits_for_the_others_at_its_end(doing: str, run: Run) -> None:
    """It is named, and no healthy rank that mpiexec has ended because of it."""
    job = run(others_and(1, AT_ITS_END[doing], doing))
    failed(job)
    how = rf"was killed by signal 9|{re.escape(SILENT.strip())}"
    assert re.search(rf"mpitrain: rank 1 on \S+ ({how}); mpiexec ended the others\n$", job.stderr), job.output


@MOSTLY_MPICH
def test_a_rank_that_vanishes_and_mpiexec_goes_on(run: Run) -> None:
    # A child of the rank keeps the rank's connection to mpiexec open. (Open MPI's mpiexec kills the others, and waits
    # for the child.)
    job = run(others_and(1, f"{HOLDER}; os._exit(0)", "barrier"))
    failed(job)
    assert re.search(rf"mpitrain: rank 1 on \S+{re.escape(SILENT)}{GOES_ON}", job.stderr), job.output
    assert job.left == []


@pytest.mark.parametrize("vendor", ["openmpi"], indirect=True)
def test_a_killed_rank_whose_fork_lives(run: Run) -> None:
    """Open MPI's mpiexec ends the others, and waits for the fork, which keeps the rank's output open."""
    job = run(others_and(1, "os.fork() or time.sleep(1000); os.kill(os.getpid(), signal.SIGKILL)", "barrier"))
    failed(job)
    how = rf"( was killed by signal 9|{re.escape(SILENT)})"
    assert re.search(rf"mpitrain: rank 1 on \S+{how}{GOES_ON}", job.stderr), job.output
    assert job.left == []


@pytest.mark.parametrize("vendor", ["mpich"], indirect=True)
def test_a_rank_that_fails_and_mpiexec_goes_on(run: Run) -> None:
    # MPICH's mpiexec sometimes goes on. Here it hears nothing, because a process keeps the rank's connection open.
    unheard = "import mpitrain.job.failure as its; its.abort = lambda comm, code: None"
    job = run(others_and(1, f"{unheard}; {HOLDER}; raise RuntimeError('bang')", "alone"))
    failed(job, "RuntimeError: bang")
    assert re.search(r"mpitrain: rank 1 on \S+ failed, and mpiexec goes on: the job is ended\n", job.stderr), job.output
    assert SILENT not in job.stderr
    assert job.left == []


@MOSTLY_MPICH
def test_a_helper_that_calls_init_and_ends_is_no_vanished_rank(run: Run) -> None:
    # It begins as the processes of multiprocessing do. Others that a rank starts are programs of their own.
    helper = "from multiprocessing.process import parent_process; import multiprocessing.process as its; "
    helper += "import mpitrain as mt; its._parent_process = its; mt.init()"
    source = START + f"import subprocess\nif rank == 1: subprocess.run([sys.executable, '-c', {helper!r}], check=False)"
    job = run(source + "\ntime.sleep(13)\nworld.barrier()")
    succeeded(job)
    assert "was called in a process that multiprocessing started" in job.stderr, job.output


def test_a_job_that_did_its_work(run: Run) -> None:
    job = run(START + "world.barrier()")
    succeeded(job)
    assert SILENT not in job.stderr


@MOSTLY_MPICH
def test_a_roll_call_that_has_gone_is_said_once(run: Run) -> None:
    job = run(START + "world.barrier()\nif rank == 0: os.remove(os.environ['_MPITRAIN_ROLL_CALL'])\nworld.barrier()")
    succeeded(job)
    assert job.stderr.count("mpitrain: cannot check that all ranks finished: ") == 1, job.output


def test_a_script_without_mpitrain(run: Run) -> None:
    succeeded(run("print('hello')"))


def test_a_failure_is_not_reported_as_a_vanished_rank_too(run: Run) -> None:
    job = run(others_and(1, "raise RuntimeError('bang')", "barrier"))
    failed(job, "RuntimeError: bang")
    assert SILENT not in job.stderr


@MOSTLY_MPICH
def test_an_error_that_has_no_words(run: Run) -> None:
    source = "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no words')\n"
    job = run(source + others_and(1, "raise Odd", "barrier"))
    failed(job, "mpitrain: rank 1 on ", "Odd: <exception str() failed>")
    assert SILENT not in job.stderr


def test_a_script_that_starts_another_job(vendor: str, tmp_path: Path) -> None:
    """The ranks of the second job do not belong to the first job. A process with two launchers is refused."""
    inner = "import mpitrain as mt; mt.init()"
    marks = ("PMI", "HYD", "OMPI_", "PRTE", "MPI_LOCAL")
    source = f"""
import os, subprocess, sys
environment = {{name: value for name, value in os.environ.items() if not name.startswith({marks}) or "ALLOW" in name}}
command = {mpiexec(3, vendor)} + [sys.executable, "-c", {inner!r}]
inner = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
assert "mpitrain run started 1 processes (_MPITRAIN_EXPECTED_SIZE=1)" in inner.stderr, inner
print("ended", inner.returncode != 0)
"""
    (tmp_path / "script.py").write_text(source)
    command = [str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "-n", "1", str(tmp_path / "script.py")]
    job = run_command(command)
    succeeded(job)
    assert "ended True\n" in job.stdout, job.output


def test_an_exit_code_is_passed_on(run: Run) -> None:
    job = run(START + "sys.exit(3)")
    failed(job)
    assert job.code == 3, job.output
    assert SILENT not in job.stderr
