"""A rank leaves, dies, or does not come to a call while the others wait for it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from faults.conftest import need
from faults.failing import START, others_and
from faults.outcome import failed, report_of, succeeded
from jobs import run_job


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
    job = run_job(3, others_and(1, "sys.exit(0)", doing))
    report = report_of(job, "MismatchError", "but rank 1 on ", " has finished (after ")
    assert report.rank != 1
    assert job.stderr.count("has finished") == 1, job.output


@pytest.mark.parametrize("doing", ["mean of a ring", "receive", "reducer"])
def test_a_rank_that_exits_with_a_code_while_the_others_wait_for_it(doing: str) -> None:
    job = run_job(3, others_and(1, "sys.exit(3)", doing))
    report = report_of(job, "left with exit code 3 (", "and another rank waits for this one")
    assert (report.rank, job.code, job.stderr.count("rank 0 on ")) == (1, 3, 0), job.output


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.nightly)])
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
@pytest.mark.parametrize("doing", ["barrier", pytest.param("finished", marks=pytest.mark.nightly)])
def test_a_rank_that_dies(ending: str, doing: str) -> None:
    failed(run_job(3, others_and(1, ending, doing)))


@pytest.mark.parametrize(
    "ending",
    ["os._exit(0)", pytest.param("os._exit(5)", marks=pytest.mark.nightly), "os.kill(os.getpid(), signal.SIGKILL)"],
)
def test_a_rank_that_dies_with_open_mpi(ending: str) -> None:
    vendor = need("openmpi")
    failed(run_job(3, others_and(1, ending, "barrier"), launcher=vendor, python=vendor))
