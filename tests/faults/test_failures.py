"""A rank that fails, or leaves while others wait for it, ends the whole job. Its message comes last; nothing is left.

Otherwise the others would wait for minutes or for ever, and `run_job` would fail at its deadline.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from faults.failing import KILL, OTHERS, START, nightly, others_and, run
from faults.outcome import failed, report_of, succeeded
from jobs import VENVS, mpiexec, run_command, run_job
from mpitrain.job import failure

# -- exceptions ------------------------------------------------------------------------------------------------------
# The other ranks continue when they know that the first has failed. The first hears of their failure, however late.
AFTER = """
import mpitrain.job.failure as its

its._ARBITRATION_SECONDS, its._READING_SECONDS = 60.0, 1.0
while rank != {first} and {first} not in world.control.notes.read:
    world.control.notes.look()
"""
SLOW = [("mpich", 3, 1, doing) for doing in OTHERS if doing != "mean of a ring"]
SLOW += [("openmpi", 3, 1, doing) for doing in ("receive", "alone", "finished")]
SLOW += [("mpich", ranks, 0, doing) for ranks, doing in product((2, 5), ("barrier", "alone"))]


@pytest.mark.parametrize(
    ("vendor", "ranks", "failing", "doing"),
    [("mpich", 3, 1, "mean of a ring"), ("openmpi", 3, 1, "mean"), *nightly(*SLOW)],
    indirect=["vendor"],
)
def test_an_exception_whatever_the_others_do(vendor: str, ranks: int, failing: int, doing: str) -> None:
    job = run(ranks, others_and(failing, "raise RuntimeError('bang')", doing), vendor)
    assert report_of(job, "RuntimeError: bang", "raise RuntimeError").rank == failing
    assert "failed too" not in job.stderr


def test_a_refusal_is_shown_with_the_program_s_own_lines() -> None:
    """The frames of the package between the program's line and the refusal say nothing about the cause."""
    job = run(2, f"{START}\nif rank == 0:\n    world.mean(1.0)\nelse:\n    world.barrier()\n")
    shown = report_of(job, "MismatchError: rank 1 on ", "world.").text
    assert shown.count("  File ") == 1, shown
    assert "mpitrain/world" not in shown


class SilentError(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


class BrokenError(Exception):
    @property
    def __cause__(self) -> None:  # type: ignore[override]
        raise OSError


def odd(kind: str) -> Exception:
    """An error that is hard to report."""
    error, other = ValueError("bang"), ValueError("before")
    if kind == "ring":
        error.__cause__, other.__context__ = other, error
    elif kind == "notes":
        error.__notes__ = 5  # type: ignore[assignment]
    elif kind == "itself":
        error.__cause__ = error
    return {"silent": SilentError(), "broken": BrokenError("bang")}.get(kind, error)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("itself", "ValueError: bang\n"),
        ("ring", "ValueError: bang\n"),
        ("notes", "ValueError: bang\n5\n"),
        ("silent", "SilentError: <exception str() failed>\n"),
        ("broken", "BrokenError: bang\n"),
    ],
)
def test_an_exception_that_is_hard_to_report(kind: str, shown: str) -> None:
    assert failure._traceback(odd(kind)).endswith(shown)
    assert failure._line(odd(kind)) == shown.splitlines()[0].rpartition("faults.")[2]


def test_a_long_report_keeps_its_end() -> None:
    """The launcher that ends a job drops what it has not read: of 2 MB, the error itself was lost."""
    error = ValueError("0" * 1_000_000)
    for number in range(200):
        error, cause = ValueError(f"{number} " + "0" * 1000), error
        error.__cause__ = cause
    report = failure._traceback(error)
    assert len(report) < 1 << 16
    assert report.startswith("ValueError: 000")
    assert "characters are left out here" in report
    assert report.endswith(f"ValueError: 199 {'0' * 1000}\n")
    assert len(failure._line(cause)) < 3000


def test_a_part_of_one_sample_may_be_why() -> None:
    """The batch has more, so one process would not fail. Behind the loop, nothing is said of it."""
    batches = "[numpy.ones((4, 3)), numpy.ones((3, 3))]"
    loop = f"{START}\nfor x in world.shard({batches}):\n"
    job = run(2, f"{loop}    x.squeeze()[:, 0]")
    report = report_of(job, "IndexError: too many indices", "mpitrain: rank 1 on ")
    assert report.rank == 1
    assert ": it computed with 1 sample of a batch of 3, and one process computes with all. " in report.text
    assert "use a batch_size of at least 2 samples a rank, drop_last=True, or fewer ranks" in report.text
    job = run(2, f"{loop}    pass\nif rank: raise ValueError('bang')")
    assert "sample" not in report_of(job, "ValueError: bang").text


def test_the_first_of_several_failures_is_the_last_word(vendor: str) -> None:
    """The others say a line each."""
    source = START + AFTER.format(first=1) + "raise RuntimeError(f'bang {rank}\\nsecond line of {rank}')"
    job = run(3, source, vendor)
    assert report_of(job, "RuntimeError: bang 1\nsecond line of 1\n").rank == 1
    for rank in (0, 2):
        assert job.stderr.count(f"bang {rank}") == 1, job.output
        assert job.stderr.count(f" failed too: RuntimeError: bang {rank}\n") == 1, job.output
        assert f"second line of {rank}" not in job.stderr
    assert job.stderr.index("failed too") < job.stderr.index("failed:"), job.output


@pytest.mark.parametrize(
    ("source", "parts", "rank"),
    [
        # All ranks know it.
        (
            "world.mean(numpy.ones(3 + (rank == 1)))",
            ("MismatchError: rank 1 on ", "the tree float64 (4,); rank 0 on ", ": the tree float64 (3,)"),
            None,
        ),
        # Only rank 2 has the traceback with the place. The others raise the same error with less information.
        (
            "with world.together('read it'):\n    if rank == 2: {}['no such key']",
            ("{}['no such key']", "KeyError: 'no such key'\n", "MpitrainError: rank 2 on ", ", read it: "),
            2,
        ),
        # The user's own, with the rank's name in it. The ranks do not even raise it at the same time.
        *nightly(
            (
                AFTER.format(first=0) + "raise OSError(f'{world.name()}: the disk is gone')",
                ("OSError: rank 0 on ", ": the disk is gone"),
                0,
            ),
        ),
    ],
    ids=["known", "together", "own"],
)
def test_the_same_error_on_all_ranks_is_printed_once(source: str, parts: tuple[str, ...], rank: int | None) -> None:
    job = run(3, START + source)
    report = report_of(job, *parts)
    assert rank in (None, report.rank)
    assert "failed too" not in job.stderr
    assert job.stderr.count("Traceback") == 1 + (rank == 2), job.output  # with its cause


@pytest.mark.parametrize("doing", ["barrier", *nightly("alone")])
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
    assert report_of(run(3, START + source, vendor), "RuntimeError: in a thread", "in fail").rank == 1


@pytest.mark.nightly
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
    report_of(run(3, START + source), "RuntimeError: in thread ")


@pytest.mark.nightly
def test_an_exception_where_something_is_gone() -> None:
    """MPI has been finalised; or stdout is closed, which must not lose the report on stderr."""
    job = run(2, START + "from mpi4py import MPI\nMPI.Finalize()\nraise RuntimeError('late')")
    failed(job, "RuntimeError: late", " failed:\nTraceback")
    source = START + "print('x' * 100)\nos.close(1)\nif rank == 1: raise RuntimeError('bang')\nworld.barrier()"
    assert report_of(run(2, source), "RuntimeError: bang").rank == 1


def test_one_rank_alone_is_like_plain_python() -> None:
    job = run_job(None, START + "def f():\n    raise RuntimeError('bang')\nf()")
    failed(job)
    assert job.code == 1, job.output
    assert job.stderr.startswith("Traceback (most recent call last):\n"), job.output
    assert job.stderr.endswith("    raise RuntimeError('bang')\nRuntimeError: bang\n"), job.output
    for source, code in (
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)", -signal.SIGINT),
        ("threading.Thread(target=lambda: 1 / 0).start()", 0),
    ):
        assert run_job(None, START + source).code == code


# -- before init() and at the end ------------------------------------------------------------------------------------
BEFORE = """
import os
import mpitrain as mt
{first}
if os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK")) in {ranks}:
    raise RuntimeError("before init")
mt.init().barrier()
"""
WITH_MPI = "from mpi4py import MPI"  # the rank would wait in MPI_Finalize at its end


@pytest.mark.parametrize(
    ("vendor", "ranks", "first"),
    [
        ("mpich", "1", ""),
        ("openmpi", "1", WITH_MPI),
        *nightly(("mpich", "1", WITH_MPI), ("openmpi", "1", ""), ("mpich", "012", ""), ("openmpi", "012", "")),
    ],
    indirect=["vendor"],
)
def test_an_exception_before_init(vendor: str, ranks: str, first: str) -> None:
    job = run(3, BEFORE.format(first=first, ranks=tuple(ranks)), vendor)
    failed(job, "RuntimeError: before init\n")
    assert len(ranks) > 1 or job.stderr.count("Traceback") == 1, job.output


def test_atexit_handlers(vendor: str) -> None:
    """They may make collective calls. An exception there is reported and ignored, as Python does."""
    source = """
def bang():
    raise RuntimeError('in atexit')
if rank == 1:
    atexit.register(bang)
atexit.register(lambda: sys.stdout.write(f'{world.mean(float(rank))}\\n'))
"""
    job = run(3, START + source, vendor)
    succeeded(job)
    assert "RuntimeError: in atexit" in job.stderr
    assert sorted(job.stdout.split()) == ["1.0", "1.0", "1.0"], job.output


@pytest.mark.nightly
def test_a_rank_that_works_on_alone_is_waited_for(vendor: str) -> None:
    job = run(3, START + "if rank == 1:\n    time.sleep(3)\n    print('late', flush=True)", vendor)
    succeeded(job)
    assert job.stdout == "late\n", job.output


@pytest.mark.nightly
def test_threads_set_on_one_rank_only(tmp_path: Path) -> None:
    """As by a module file or a wrapper script on one machine."""
    (tmp_path / "script.py").write_text(START + "world.barrier(); world.print('all here', all_ranks=True)")
    program = [sys.executable, str(tmp_path / "script.py")]
    differs = ["env", "OMP_NUM_THREADS=1", *program, ":", "-n", "1", "env", "-u", "OMP_NUM_THREADS", *program]
    job = run_command([*mpiexec(1), *differs])
    succeeded(job)
    assert job.stdout.count("all here") == 2


# -- a rank that leaves, or does not come to a call ------------------------------------------------------------------
# (`send` and `broadcast` wait for a call of rank 1, which leaves without making one.)
WAITING = ["mean", "barrier", "broadcast", "receive", "send", "reducer"]


@pytest.mark.parametrize("doing", ["mean of a ring", *nightly(*WAITING)])
def test_a_rank_that_exits_while_the_others_wait_for_it(doing: str) -> None:
    job = run(3, others_and(1, "sys.exit(0)", doing))
    assert report_of(job, "MismatchError", "but rank 1 on ", " has finished (after ").rank != 1
    assert job.stderr.count("has finished") == 1, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("doing", ["receive", "mean of a ring", "reducer"])
def test_a_rank_that_exits_with_a_code_while_the_others_wait_for_it(doing: str) -> None:
    job = run(3, others_and(1, "sys.exit(3)", doing))
    report = report_of(job, "left with exit code 3 (", "and another rank waits for this one")
    assert (report.rank, job.code, job.stderr.count("rank 0 on ")) == (1, 3, 0), job.output


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "vendor"), [(2, "mpich"), (5, "mpich"), (3, "openmpi")], indirect=["vendor"])
def test_a_rank_with_fewer_steps(ranks: int, vendor: str) -> None:
    job = run(ranks, START + "for _ in range(5 - (rank == 1)): world.mean(numpy.ones(3))", vendor)
    report_of(job, "waits in mean (its call ", "but rank 1 on ", "the same number of steps?")


@pytest.mark.parametrize(
    ("vendor", "ending", "doing"),
    [
        ("mpich", KILL, "barrier"),
        *nightly(("openmpi", KILL, "barrier")),
        *nightly(*product(["mpich"], ["os._exit(5)", KILL.replace("KILL)", "SEGV)")], ["barrier", "finished"])),
        *nightly(("mpich", KILL, "finished"), *product(["openmpi"], ["os._exit(0)", "os._exit(5)"], ["barrier"])),
    ],
    indirect=["vendor"],
)
def test_a_rank_that_dies(vendor: str, ending: str, doing: str) -> None:
    failed(run(3, others_and(1, ending, doing), vendor))


@pytest.mark.nightly
def test_a_rank_that_ends_after_dropping_a_handle_still_does_its_part() -> None:
    source = "handle = mt.collectives.allgather(world, numpy.full(300_000, rank))\n"
    source += "if rank == 1:\n    del handle\nelse:\n    print(sorted(set(handle.wait().tolist())))"
    job = run(3, START + source)
    succeeded(job)
    assert job.stdout.count("[0, 1, 2]") == 2


@pytest.mark.nightly
def test_a_dropped_handle_whose_call_another_rank_never_makes() -> None:
    job = run(3, START + "if rank != 1: mt.collectives.allreduce(world, numpy.ones(5))")
    assert report_of(job, "MismatchError", "but rank 1 on ", " has finished (after ").rank != 1


SUMS = """
from mpitrain.allreduce import make_algorithm

algorithm = make_algorithm(world, sys.argv[1])
flat = numpy.full(300_000, rank + 1.0)
handle = algorithm.start(flat, agreed=AGREED)
"""


@pytest.mark.parametrize("name", ["ring", *nightly("shared_memory", "direct", "native")])
def test_a_rank_that_ends_without_waiting_still_takes_part(name: str) -> None:
    source = SUMS.replace("AGREED", "True") + "if rank:\n    handle.wait()\n    assert (flat == 6).all()\n"
    succeeded(run(3, START + source, "mpich", name))


@pytest.mark.parametrize(
    ("name", "agreed"), [("ring", True), *nightly(("ring", False), ("shared_memory", True), ("shared_memory", False))]
)
def test_a_sum_that_one_rank_starts_alone_is_an_error(name: str, agreed: bool) -> None:
    source = f"{SUMS}handle.wait()\nif rank == 1: algorithm.start(flat, agreed=AGREED)"
    job = run(3, START + source.replace("AGREED", str(agreed)), "mpich", name)
    assert report_of(job, "MismatchError: rank 1 on ", f"allreduce {name} of 300000 float64", "has finished").rank == 1


# -- worlds of some ranks of a job -----------------------------------------------------------------------------------
# Ranks 0 and 2 of three. Rank 1 ends at the beginning.
PART = """
from mpitrain import collectives
from mpitrain.job.worlds import make_world

if rank == 1:
    sys.exit()
part = make_world(world.comm.Create_group(world.comm.group.Incl([0, 2])), parent=world)
assert (part.rank, part.size, part.parent) == (rank // 2, 2, world)

def call():
    assert part.sum(10**part.rank) == 11

def begin():
    assert collectives.allgather(part, numpy.full(1, part.rank)).wait().tolist() == [0, 1]
"""
TORCH = """
import os, sys
import torch
import torch.distributed as dist
import mpitrain.torch

dist.init_process_group("mpitrain")
rank = dist.get_rank()
group = dist.new_group([0, 2])
if rank == 1:
    sys.exit()

def call():
    value = torch.full((3,), 10.0 ** (rank // 2))
    dist.all_reduce(value, group=group)
    assert value.tolist() == [11.0] * 3
"""
FATES = {"ends": "sys.exit()", "raises": "raise KeyError('no such batch')", "is killed": "os.kill(os.getpid(), 9)"}
CALLS = {
    "sum": (START + PART, "call", "sum"),
    "collectives": (START + PART, "begin", "collectives.allgather of int64"),
    "torch": (TORCH, "call", "all_reduce of 3 float32"),
}
# PyTorch adds the text of a wait, which only the end of a rank shows.
IN_CI = [("sum", "raises", "mpich")]


@pytest.mark.parametrize(
    ("kind", "fate", "vendor"),
    [*IN_CI, *nightly(*(one for one in product(CALLS, FATES, ("mpich", "openmpi")) if one not in IN_CI))],
    indirect=["vendor"],
)
def test_the_others_of_a_part_hear_of_it(kind: str, fate: str, vendor: str) -> None:
    source, call, doing = CALLS[kind]
    if kind == "torch":
        probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
        if subprocess.run([VENVS[vendor] / "bin/python", "-c", probe], check=False).returncode:
            pytest.skip("PyTorch is not installed")
    job = run(3, f"{source}\nfor _ in range(3): {call}()\nif rank == 2:\n    {FATES[fate]}\n{call}()", vendor)
    if fate == "is killed":
        failed(job)
    elif fate == "raises":
        assert report_of(job, "KeyError: 'no such batch'").rank == 2
    else:
        report = report_of(job, "MismatchError: rank 0 on ", f"waits in {doing}", "but rank 2 on ", " has finished (")
        assert report.rank == 0


@pytest.mark.nightly
def test_calls_are_counted_for_each_world() -> None:
    """The note of a rank that ends has its number of calls in each of its worlds, even in a freed one."""
    source = """
from mpitrain.job.worlds import make_world

pair = (0, 2) if rank != 1 else (1,)
part = make_world(world.comm.Split(rank == 1, rank), parent=world)
inner = make_world(part.comm, parent=part)
assert part.control.members == inner.control.members == pair
assert inner.name(inner.size - 1) == world.name(pair[-1])
for _ in range(5):
    part.barrier()
for _ in range(3):
    inner.barrier()
inner.free()
if rank == 0:
    notes = world.control.notes
    while 2 not in notes.read:
        notes.look()
    made = notes.read[2].made
    assert list(made.values())[1:] == [5, 3], made  # after those of init() in the first world
    assert {number: made[number] for number in notes.made} == notes.made == made
"""
    succeeded(run(3, START + source))
