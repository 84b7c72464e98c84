"""A rank that fails ends the whole job, whatever the others do. Its message comes last; nothing is left.

Otherwise the others would wait for minutes or for ever, and `run_job` would fail at its deadline.
"""

from __future__ import annotations

import signal

import pytest

from faults.conftest import need
from faults.failing import OTHERS, START, others_and
from faults.outcome import failed, report_of
from jobs import run_job

# The other ranks go on when they know that the first has failed. The first hears of their failure, however late.
AFTER = """
import mpitrain.job.failure as its

its._ARBITRATION_SECONDS, its._READING_SECONDS = 60.0, 1.0
while rank != {first} and {first} not in world.control.notes.read:
    world.control.notes.look()
"""


@pytest.mark.parametrize("doing", OTHERS)
def test_an_exception_whatever_the_others_do(doing: str) -> None:
    job = run_job(3, others_and(1, "raise RuntimeError('bang')", doing))
    assert report_of(job, "RuntimeError: bang", "raise RuntimeError").rank == 1
    assert "failed too" not in job.stderr


def test_a_refusal_is_shown_with_the_program_s_own_lines() -> None:
    """The frames of the package between the program's line and the refusal say nothing about the cause."""
    job = run_job(2, f"{START}\nif rank == 0:\n    world.mean(1.0)\nelse:\n    world.barrier()\n")
    shown = report_of(job, "MismatchError: rank 1 on ", "world.").text
    assert shown.count("  File ") == 1, shown
    assert "mpitrain/world" not in shown


ODD = """
class SilentError(Exception):
    def __str__(self):
        raise SystemExit(0)

class BrokenError(Exception):
    @property
    def __cause__(self):
        raise OSError

def ring():
    error, other = ValueError("bang"), ValueError("before")
    error.__cause__, other.__context__ = other, error
    raise error

def noted():
    error = ValueError("bang")
    error.__notes__ = 5
    raise error

def itself():
    error = ValueError("bang")
    raise error from error

if rank == 1:
"""


@pytest.mark.parametrize(
    ("ending", "shown"),
    [
        ("itself()", "ValueError: bang\n"),
        ("ring()", "ValueError: bang\n"),
        ("noted()", "ValueError: bang\n5\n"),
        ("raise SilentError", "SilentError: <exception str() failed>\n"),
        ("raise BrokenError('bang')", "BrokenError: bang\n"),
    ],
)
def test_an_exception_that_is_hard_to_report(ending: str, shown: str) -> None:
    job = run_job(2, START + ODD + f"    {ending}\nworld.barrier()")
    assert report_of(job, shown).rank == 1


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("doing", ["barrier", pytest.param("alone", marks=pytest.mark.nightly)])
def test_an_exception_in_other_worlds(ranks: int, doing: str) -> None:
    job = run_job(ranks, others_and(0, "raise RuntimeError('bang')", doing))
    assert report_of(job, "RuntimeError: bang").rank == 0


@pytest.mark.parametrize(
    "doing", ["mean", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("receive", "alone")), "finished"]
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


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.nightly)])
def test_an_error_that_all_ranks_know_is_printed_once(ranks: int) -> None:
    job = run_job(ranks, START + "world.mean(numpy.ones(3 + (rank == 1)))")
    report_of(job, "MismatchError: rank 1 on ", "the tree float64 (4,); rank 0 on ", ": the tree float64 (3,)")
    assert job.stderr.count("MismatchError") == 1, job.output
    assert "failed too" not in job.stderr


def test_the_same_error_on_all_ranks_is_printed_once() -> None:
    # The error is the user's own and has the rank's name in it. The ranks do not even raise it at the same time.
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


@pytest.mark.parametrize("doing", ["barrier", pytest.param("alone", marks=pytest.mark.nightly)])
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
    # The report goes to stderr. The report must not be lost if stdout cannot be flushed.
    source = START + "print('x' * 100)\nos.close(1)\nif rank == 1: raise RuntimeError('bang')\nworld.barrier()"
    assert report_of(run_job(2, source), "RuntimeError: bang").rank == 1


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
