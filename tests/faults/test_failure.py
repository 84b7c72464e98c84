"""A rank that fails or leaves ends the whole job, whatever the others do. Its message is the last; nothing is left.

Without this the others would wait for minutes or for ever; `run_job` then fails at its deadline.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.conftest import need
from faults.outcome import failed, report_of, succeeded
from jobs import KERNEL_KEEPS_CODES, VENVS, Job, mpiexec, run_command, run_job, until

START = """
import atexit, os, pathlib, signal, sys, threading, time
import numpy
import mpitrain as mt

world = mt.init()
rank = world.rank
"""

# For tests that do not depend on the MPI library, or depend only on MPICH.
MOSTLY_MPICH = pytest.mark.parametrize(
    "vendor", ["mpich", pytest.param("openmpi", marks=pytest.mark.slow)], indirect=True
)
# What the other ranks do while rank 1 fails.
OTHERS = {
    "mean": "while True: world.mean(numpy.ones(5))",
    "mean of a ring": "world.mean(numpy.ones(2**20))",
    "barrier": "world.barrier()",
    "broadcast": "world.broadcast('x', root=1)",
    "receive": "world.receive(1)",
    "send": "world.send(numpy.ones(2**20), 1)",
    "reducer": """
reducer.begin(1)
reducer.ready(0, numpy.ones(3))
reducer.finish()
""",
    "alone": "time.sleep(1000)",
    "finished": "sys.exit(0)",
}
REDUCER = "reducer = mt.GradientReducer(world, [mt.Parameter('w', (3,), numpy.dtype('float64'))])\n"


def others_and(rank: int, ending: str, doing: str) -> str:
    """Rank `rank` ends shortly after all the others have begun to do something."""
    body = "\n".join("    " + line for line in OTHERS[doing].strip().splitlines())
    return START + REDUCER + f"if rank == {rank}:\n    time.sleep(0.3)\n    {ending}\nelse:\n{body}\n"


# The other ranks go on when they know that the first has failed. The first hears of their failure, however late.
AFTER = """
import mpitrain.job.failure as its

its._ARBITRATION_SECONDS, its._READING_SECONDS = 60.0, 1.0
while rank != {first} and {first} not in world.control.notes.read:
    world.control.notes.look()
"""


# -- exceptions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("doing", OTHERS)
def test_an_exception_whatever_the_others_do(doing: str) -> None:
    job = run_job(3, others_and(1, "raise RuntimeError('bang')", doing))
    assert report_of(job, "RuntimeError: bang", "raise RuntimeError").rank == 1
    assert "failed too" not in job.stderr


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("doing", ["barrier", pytest.param("alone", marks=pytest.mark.slow)])
def test_an_exception_in_other_worlds(ranks: int, doing: str) -> None:
    job = run_job(ranks, others_and(0, "raise RuntimeError('bang')", doing))
    assert report_of(job, "RuntimeError: bang").rank == 0


@pytest.mark.parametrize(
    "doing", ["mean", *(pytest.param(one, marks=pytest.mark.slow) for one in ("receive", "alone")), "finished"]
)
def test_an_exception_with_open_mpi(doing: str) -> None:
    vendor = need("openmpi")
    job = run_job(3, others_and(1, "raise RuntimeError('bang')", doing), launcher=vendor, python=vendor)
    assert report_of(job, "RuntimeError: bang").rank == 1


def test_the_first_of_several_failures_is_the_last_word(vendor: str) -> None:
    source = START + AFTER.format(first=1) + "raise RuntimeError(f'bang {rank}')"
    job = run_job(3, source, launcher=vendor, python=vendor)
    assert report_of(job, "RuntimeError: bang 1\n").rank == 1
    for rank in (0, 2):
        assert job.stderr.count(f"bang {rank}") == 1, job.output
        assert job.stderr.count(f" failed too: RuntimeError: bang {rank}\n") == 1, job.output
    assert job.stderr.index("failed too") < job.stderr.index("failed:"), job.output


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_an_error_that_all_ranks_know_is_printed_once(ranks: int) -> None:
    job = run_job(ranks, START + "world.mean(numpy.ones(3 + (rank == 1)))")
    report_of(job, "MismatchError: rank 1 on ", "the tree float64 (4,); rank 0 on ", ": the tree float64 (3,)")
    assert job.stderr.count("MismatchError") == 1, job.output
    assert "failed too" not in job.stderr


def test_the_same_error_on_all_ranks_is_printed_once() -> None:
    # The user's own error, with the rank's own name in it. The ranks do not even raise it at the same time.
    job = run_job(3, START + AFTER.format(first=0) + "raise OSError(f'{world.name()}: the disk is gone')")
    report_of(job, "OSError: rank 0 on ", ": the disk is gone")
    assert job.stderr.count("the disk is gone") == 1 + job.stderr.count("raise OSError"), job.output
    assert "failed too" not in job.stderr


def test_what_failed_on_one_rank_is_reported_by_that_rank() -> None:
    # Only rank 2 has the traceback with the place. The others raise the same error with less information.
    job = run_job(3, START + "with world.together('read it'):\n    if rank == 2: {}['no such key']")
    report = report_of(
        job, "{}['no such key']", "KeyError: 'no such key'\n", "MpitrainError: rank 2 on ", ", read it: "
    )
    assert report.rank == 2
    assert "failed too" not in job.stderr


def test_a_failure_says_more_than_one_line_only_once() -> None:
    job = run_job(2, START + AFTER.format(first=0) + "raise OSError(f'bang {rank}\\nsecond line of {rank}')")
    report_of(job, "OSError: bang 0\nsecond line of 0\n")
    assert job.stderr.count("failed too: OSError: bang 1\n") == 1, job.output
    assert "second line of 1" not in job.stderr


@pytest.mark.parametrize("doing", ["barrier", pytest.param("alone", marks=pytest.mark.slow)])
def test_an_exception_in_a_thread(doing: str, vendor: str) -> None:
    source = f"""
def fail():
    time.sleep(0.3)
    raise RuntimeError("in a thread")
if rank == 1:
    threading.Thread(target=fail, daemon=True).start()
    time.sleep(1000)
{OTHERS[doing]}
"""
    job = run_job(3, START + source, launcher=vendor, python=vendor)
    assert report_of(job, "RuntimeError: in a thread", "in fail").rank == 1


def test_exceptions_in_many_threads_of_all_ranks() -> None:
    source = """
def fail(number):
    raise RuntimeError(f"in thread {number} of {rank}")
for number in range(4):
    threading.Thread(target=fail, args=[number]).start()
if rank:
    world.barrier()
time.sleep(1000)
"""
    report_of(run_job(3, START + source), "RuntimeError: in thread ")


def test_an_exception_after_mpi_was_finalized() -> None:
    job = run_job(2, START + "from mpi4py import MPI\nMPI.Finalize()\nraise RuntimeError('late')")
    failed(job, "RuntimeError: late", " failed:\nTraceback")


def test_nobody_reads_stdout() -> None:
    # The report goes to stderr. It must not be lost if stdout cannot be flushed.
    source = START + "print('x' * 100)\nos.close(1)\nif rank == 1: raise RuntimeError('bang')\nworld.barrier()"
    assert report_of(run_job(2, source), "RuntimeError: bang").rank == 1


# -- before init() and after the end -----------------------------------------------------------------------------

BEFORE = """
import os
import re
{imports}
if os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK")) == "1":
    raise RuntimeError("before init")
mt.init().barrier()
"""


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 5))])
def test_an_exception_before_init(ranks: int) -> None:
    job = run_job(ranks, BEFORE.format(imports="import mpitrain as mt"))
    failed(job, "RuntimeError: before init\n")
    assert job.stderr.count("Traceback") == 1, job.output


@pytest.mark.parametrize("first", ["import mpitrain as mt", "import mpitrain as mt\nfrom mpi4py import MPI"])
def test_an_exception_before_init_with_either_library(first: str, vendor: str) -> None:
    # In the second case MPI is already initialised: at its end the rank would wait in MPI_Finalize.
    job = run_job(3, BEFORE.format(imports=first), launcher=vendor, python=vendor)
    failed(job, "RuntimeError: before init\n")


def test_an_exception_on_all_ranks_before_init(vendor: str) -> None:
    job = run_job(3, "import mpitrain\nraise RuntimeError('before init')", launcher=vendor, python=vendor)
    failed(job, "RuntimeError: before init\n")


def test_an_exception_in_an_atexit_handler_is_reported_and_ignored_as_python_does(vendor: str) -> None:
    source = START + "def bang(): raise RuntimeError('in atexit')\nif rank == 1: atexit.register(bang)"
    job = run_job(3, source, launcher=vendor, python=vendor)
    succeeded(job)
    assert "RuntimeError: in atexit" in job.stderr


def test_collective_calls_in_atexit_handlers() -> None:
    job = run_job(3, START + "atexit.register(lambda: sys.stdout.write(f'{world.mean(float(rank))}\\n'))")
    succeeded(job)
    assert sorted(job.stdout.split()) == ["1.0", "1.0", "1.0"], job.output


def test_a_rank_that_works_on_alone_is_waited_for(vendor: str) -> None:
    source = START + "if rank == 1:\n    time.sleep(3)\n    print('late', flush=True)"
    job = run_job(3, source, launcher=vendor, python=vendor)
    succeeded(job)
    assert job.stdout == "late\n", job.output


def test_a_forked_child_is_no_rank() -> None:
    source = (
        START
        + """
if rank == 0:
    child = os.fork()
    if child == 0:
        try:
            raise RuntimeError("in a child")
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
world.barrier()
"""
    )
    job = run_job(2, source)
    succeeded(job)
    assert "RuntimeError: in a child" in job.stderr
    assert "failed" not in job.stderr


@pytest.mark.parametrize("init", ["", "mt.init()"])
def test_a_helper_of_a_rank_is_no_rank(init: str) -> None:
    source = f"""
import subprocess, sys
import mpitrain as mt
{init}
helper = subprocess.run([sys.executable, "-c", "import mpitrain; raise RuntimeError('in a helper')"], check=False)
assert helper.returncode == 1, helper.returncode
mt.init().barrier()
"""
    job = run_job(2, source)
    succeeded(job)
    assert job.stderr.count("RuntimeError: in a helper\n") == 2, job.output


def test_a_long_wait_is_reported(tmp_path: Path) -> None:
    """Rank 1 waits for the other end of a pipe. The test opens that end when the report has come."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    said: list[str] = []

    def during(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if "no progress" in line:
                pipe.write_text("")
                break

    source = START + "if rank:\n    open(sys.argv[1]).close()\nworld.barrier()"
    job = run_job(2, source, str(pipe), env={"MPITRAIN_STALL_SECONDS": "2"}, during=during)
    succeeded(job)
    name = re.escape(socket.gethostname())
    words = rf"no progress for [\d.]+ s: rank 0 on {name} waits in barrier \(call \d+\); rank 1 on {name} sleeps in "
    assert said and re.search(words, said[-1]), (said, job.output)


# -- calls that are never waited for ---------------------------------------------------------------------------------


def test_a_rank_that_ends_after_dropping_a_handle_still_does_its_part() -> None:
    source = "handle = mt.collectives.allgather(world, numpy.full(300_000, rank))\n"
    source += "if rank == 1:\n    del handle\nelse:\n    print(sorted(set(handle.wait().tolist())))"
    job = run_job(3, START + source)
    succeeded(job)
    assert job.stdout.count("[0, 1, 2]") == 2


def test_a_dropped_handle_whose_call_another_rank_never_makes() -> None:
    job = run_job(3, START + "if rank != 1: mt.collectives.allreduce(world, numpy.ones(5))")
    report = report_of(job, "MismatchError", "but rank 1 on ", " has finished (after ")
    assert report.rank != 1


# -- a rank that leaves ------------------------------------------------------------------------------------------

# (`send` and `broadcast` wait for a call of rank 1, which leaves without making one.)
WAITING = ["mean", "mean of a ring", "barrier", "broadcast", "receive", "send", "reducer"]


@pytest.mark.parametrize("doing", WAITING)
def test_a_rank_that_exits_while_the_others_wait_for_it(doing: str) -> None:
    job = run_job(3, others_and(1, "sys.exit(3)", doing))
    report = report_of(job, "MismatchError", "but rank 1 on ", " has finished (after ")
    assert report.rank != 1
    assert job.stderr.count("has finished") == 1, job.output


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_rank_with_fewer_steps(ranks: int) -> None:
    source = START + "for _ in range(5 - (rank == 1)): world.mean(numpy.ones(3))"
    report_of(run_job(ranks, source), "waits in mean (its call ", "but rank 1 on ", "the same number of steps?")


def test_a_rank_with_fewer_steps_with_open_mpi() -> None:
    vendor = need("openmpi")
    source = START + "for _ in range(5 - (rank == 1)): world.mean(numpy.ones(3))"
    job = run_job(3, source, launcher=vendor, python=vendor)
    report_of(job, "waits in mean (its call ", "but rank 1 on ", "the same number of steps?")


def test_the_same_exit_code_on_all_ranks(vendor: str) -> None:
    job = run_job(3, START + "sys.exit(3)", launcher=vendor, python=vendor)
    failed(job)
    assert job.code == 3, job.output
    assert "mpitrain" not in job.stderr, job.output


def test_an_exit_code_of_one_rank_when_all_are_done(vendor: str) -> None:
    job = run_job(
        3, START + "world.barrier()\nif rank == 2: sys.exit('not good enough')", launcher=vendor, python=vendor
    )
    failed(job, "not good enough\n")
    assert job.code == 1, job.output


@pytest.mark.parametrize("ending", ["os._exit(5)", *(f"os.kill(os.getpid(), signal.SIG{s})" for s in ("KILL", "SEGV"))])
@pytest.mark.parametrize("doing", ["barrier", pytest.param("finished", marks=pytest.mark.slow)])
def test_a_rank_that_dies(ending: str, doing: str) -> None:
    failed(run_job(3, others_and(1, ending, doing)))


@pytest.mark.parametrize(
    "ending",
    ["os._exit(0)", pytest.param("os._exit(5)", marks=pytest.mark.slow), "os.kill(os.getpid(), signal.SIGKILL)"],
)
def test_a_rank_that_dies_with_open_mpi(ending: str) -> None:
    vendor = need("openmpi")
    failed(run_job(3, others_and(1, ending, "barrier"), launcher=vendor, python=vendor))


# -- signals -----------------------------------------------------------------------------------------------------

READY = "pathlib.Path(sys.argv[1], f'ready.{rank}').touch()\n"
BUSY = {
    "compute": "while True: sum(range(1000))",
    "wait": "if rank == 0: time.sleep(1000)\nworld.barrier()",
    "finished": "if rank == 0: time.sleep(1000)",
}


def signalled(doing: str, folder: Path, vendor: str, number: int, times: int) -> Job:
    """A job of three ranks that gets a signal as from a terminal: it goes to mpiexec and its whole process group."""

    def during(process: subprocess.Popen[str]) -> None:
        until(lambda: len(list(folder.glob("ready.*"))) == 3, "the ranks did not start")
        time.sleep(0.2)
        for _ in range(times):
            os.killpg(process.pid, number)
            time.sleep(0.1)

    source = START + READY + BUSY[doing]
    return run_job(3, source, str(folder), launcher=vendor, python=vendor, during=during)


@pytest.mark.parametrize("doing", BUSY)
def test_ctrl_c(doing: str, tmp_path: Path) -> None:
    job = signalled(doing, tmp_path, "mpich", signal.SIGINT, 1)
    assert report_of(job).text == "interrupted\n"


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_with_open_mpi(times: int, tmp_path: Path) -> None:
    failed(signalled("wait", tmp_path, need("openmpi"), signal.SIGINT, times))


def test_ctrl_c_twice(tmp_path: Path) -> None:
    job = signalled("wait", tmp_path, "mpich", signal.SIGINT, 2)
    if "pmip_cb.c" in job.stderr and "assert (!closed) failed" in job.stderr:
        # In rare cases MPICH's own proxy fails on the second signal. mpiexec then returns 0; nothing is left.
        assert not job.left
        return
    failed(job)


def test_sigterm(vendor: str, tmp_path: Path) -> None:
    failed(signalled("wait", tmp_path, vendor, signal.SIGTERM, 1))


# -- a world of one behaves like plain Python ----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [None, 1])
def test_one_rank_alone(ranks: int | None) -> None:
    job = run_job(ranks, START + "def f():\n    raise RuntimeError('bang')\nf()")
    failed(job)
    assert job.code == 1, job.output
    assert job.stderr.startswith("Traceback (most recent call last):\n"), job.output
    assert job.stderr.endswith("    raise RuntimeError('bang')\nRuntimeError: bang\n"), job.output


def test_one_rank_alone_exits_as_it_likes() -> None:
    assert run_job(None, START + "sys.exit(3)").code == 3
    assert run_job(None, START + "os._exit(4)").code == 4
    assert run_job(None, START + "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)").code == -signal.SIGINT
    assert run_job(None, START + "threading.Thread(target=lambda: 1 / 0).start()").code == 0


# -- mpitrain run: exit code 0 means that all ranks came to their end ------------------------------------------------

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
    # MPICH's mpiexec sometimes does not notice it. The guard then does.
    failed(job)
    assert re.search(rf"mpitrain: rank 1( on \S+)?{re.escape(SILENT)}(\n|{GOES_ON})", job.stderr), job.output


@MOSTLY_MPICH
def test_a_rank_that_vanishes_and_mpiexec_goes_on(run: Run) -> None:
    # A child of the rank keeps the rank's connection to mpiexec open. (Open MPI's kills the others and waits for it.)
    job = run(others_and(1, f"{HOLDER}; os._exit(0)", "barrier"))
    failed(job)
    assert re.search(rf"mpitrain: rank 1 on \S+{re.escape(SILENT)}{GOES_ON}", job.stderr), job.output
    assert job.left == []


@pytest.mark.parametrize("vendor", ["openmpi"], indirect=True)
def test_a_killed_rank_whose_fork_lives(run: Run) -> None:
    """Open MPI's mpiexec ends the others, and waits for the fork, which keeps the rank's output open."""
    job = run(others_and(1, "os.fork() or time.sleep(1000); os.kill(os.getpid(), signal.SIGKILL)", "barrier"))
    failed(job)
    assert re.search(rf"mpitrain: rank 1 on \S+{re.escape(SILENT)}{GOES_ON}", job.stderr), job.output
    assert job.left == []


@pytest.mark.parametrize("vendor", ["mpich"], indirect=True)
def test_a_rank_that_fails_and_mpiexec_goes_on(run: Run) -> None:
    # MPICH's mpiexec sometimes does so. Here it hears of nothing: a process keeps the rank's connection open.
    unheard = "import mpitrain.job.failure as its; its.abort = lambda comm, code: None"
    job = run(others_and(1, f"{unheard}; {HOLDER}; raise RuntimeError('bang')", "alone"))
    failed(job, "RuntimeError: bang")
    assert re.search(r"mpitrain: rank 1 on \S+ failed, and mpiexec goes on: the job is ended\n", job.stderr), job.output
    assert SILENT not in job.stderr
    assert job.left == []


@MOSTLY_MPICH
def test_a_helper_that_calls_init_and_ends_is_no_vanished_rank(run: Run) -> None:
    helper = "import mpitrain as mt, multiprocessing.process as its; its._parent_process = its; mt.init()"
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
    """The ranks of the second job do not belong to the first. Two launchers of one process are refused."""
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
