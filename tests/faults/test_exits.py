"""A rank that leaves by an exit, or by an exception that another library's hook has hidden: who it was, and why."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from faults.failing import START, others_and
from faults.outcome import failed, succeeded
from jobs import KERNEL_KEEPS_CODES, Job, run_command, run_job


def run(tmp_path: Path, source: str, ranks: int = 2, *words: str) -> Job:
    (tmp_path / "script.py").write_text(source)
    command = [sys.executable, "-m", "mpitrain", "run", "-n", str(ranks), str(tmp_path / "script.py"), *words]
    return run_command(command)


@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        ("sys.exit(3)", 3, "left with exit code 3 (script.py:"),
        ("sys.exit('no data.csv')", 1, "left with exit code 1: no data.csv (script.py:"),
        ("raise SystemExit(4)", 4, "left with exit code 4"),
        ("exit(5)", 5, "left with exit code 5"),
        ("sys.exit(-1)", 255, "left with exit code 255"),
        ("raise type('Stop', (SystemExit,), {})('enough')", 1, "left with exit code 1: enough"),
    ],
)
def test_an_exit_that_others_wait_for(tmp_path: Path, ending: str, code: int, text: str) -> None:
    job = run(tmp_path, others_and(1, ending, "barrier"))
    assert job.code == code, job.output
    assert "mpitrain: rank 1 on " in job.stderr, job.output
    assert text in job.stderr, job.output
    assert ", and another rank waits for this one\n" in job.stderr, job.output
    assert "rank 0 on " not in job.stderr, job.output


def test_an_exit_that_nobody_waits_for(tmp_path: Path) -> None:
    job = run(tmp_path, START + "if rank: sys.exit(3)\ntime.sleep(0.5); print('done')")
    assert (job.code, "done" in job.stdout, job.stderr) == (3, True, ""), job.output


def test_an_exit_says_enough_of_the_calls_that_were_not_made() -> None:
    """What the ranks compare at their end differs, of course."""
    job = run_job(2, START + "world.control.notes.final[1] = (1.0 + rank,)\nif rank: sys.exit(3)")
    assert (job.code, job.stderr) == (3, ""), job.output


def test_an_exit_that_is_caught(tmp_path: Path) -> None:
    source = "try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3; error.code = 0\nworld.barrier()"
    succeeded(run(tmp_path, START + source))


@pytest.mark.parametrize(
    "hook", ["lambda *_: print('shown', file=sys.stderr)", "lambda *_: 1 / 0", "lambda *_: sys.exit(9)"]
)
def test_another_hook_has_hidden_the_exception(tmp_path: Path, hook: str) -> None:
    thread = "threading.Thread(target=time.sleep, args=[1000]).start()"  # Python would wait for it
    job = run(
        tmp_path, START + f"sys.excepthook = {hook}\n" + others_and(1, f"{thread}; raise OSError('bang')", "mean")
    )
    failed(job, "mpitrain: rank 1 on ", "OSError: bang\n")
    assert "has finished" not in job.stderr, job.output


BEFORE = """
import argparse, os, sys, signal
import mpitrain as mt
if os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK")) == "1":
    {}
mt.init()
"""


WRONG_OPTION = "argparse.ArgumentParser().parse_args(['--lerning-rate'])"


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(3)", 3, "mpitrain: rank 1 on {host} left with exit code 3 (script.py:5) before it called init()"),
        (
            "sys.excepthook = lambda *_: None; raise OSError",
            1,
            "mpitrain: rank 1 on {host} failed before it called init(): OSError",
        ),
        ("os._exit(3)", 1, "the job has not started: rank 1 on {host} ended before calling init()"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "mpitrain: rank 1 on {host} was killed by signal 11"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "mpitrain: rank 1 on {host} was killed by signal 9"),
    ],
)
def test_before_init(tmp_path: Path, ending: str, code: int, said: str) -> None:
    job = run(tmp_path, BEFORE.format(ending))
    failed(job, said.format(host=socket.gethostname()))
    assert job.code == code, job.output
    assert "BAD TERMINATION" not in job.output


@pytest.mark.parametrize(
    ("ending", "code", "text", "last"),
    [
        ("sys.exit(3)", 3, "left with exit code 3 (", ".py:5) before it called init()\n"),
        ("sys.exit('no data')", 1, "left with exit code 1: no data (", ".py:5) before it called init()\n"),
        ("sys.exit(-1)", 255, "left with exit code 255 (", ".py:5) before it called init()\n"),
        (WRONG_OPTION, 2, "left with exit code 2 (", ".py:5) before it called init()\n"),
        ("raise OSError('bang')", 1, "Traceback (", "OSError: bang\n"),
    ],
)
def test_the_code_of_an_exit_before_init_is_that_of_mpiexec(
    ending: str, code: int, text: str, last: str, vendor: str
) -> None:
    """The others wait in MPI_Init. MPICH's mpiexec is quiet: the rank's own line is the last one."""
    job = run_job(3, BEFORE.format(ending), launcher=vendor, python=vendor)
    failed(job, text, last)
    assert job.code == code, job.output
    assert vendor != "mpich" or (job.stdout == "" and job.stderr.endswith(last)), job.output


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_exit_of_all_ranks_before_init_is_said_once(tmp_path: Path, ranks: int) -> None:
    job = run(tmp_path, f"import argparse\nimport mpitrain\n{WRONG_OPTION}", ranks)
    failed(job, "left with exit code 2 (script.py:3) before it called init()\n")
    assert job.code == 2, job.output
    lines = [line for line in job.stderr.splitlines() if "left with exit code 2" in line]
    assert all(line.endswith("before it called init()") for line in lines), job.output


def test_a_forked_child_that_fails_before_init_fails_alone() -> None:
    child = (
        "pid = os.fork()\n    if pid == 0: raise OSError('of the child')\n    print('code', os.waitpid(pid, 0)[1] >> 8)"
    )
    job = run_job(2, BEFORE.format(child))
    succeeded(job)
    assert job.stdout == "code 1\n", job.output
    assert job.stderr.endswith("OSError: of the child\n"), job.output


def test_a_rank_without_its_connection_to_mpiexec_ends_the_job_all_the_same(tmp_path: Path) -> None:
    """Another file has the number of the connection by now, and stays as it was."""
    ending = f"os.dup2(os.open('{tmp_path}/file', os.O_RDWR | os.O_CREAT), int(os.environ['PMI_FD'])); sys.exit(3)"
    job = run(tmp_path, BEFORE.format(ending))
    failed(job, "left with exit code 3 (script.py:5) before it called init()")
    assert (tmp_path / "file").read_bytes() == b""


def test_a_python_that_keeps_its_types_in_another_way(tmp_path: Path) -> None:
    """Then an exit by sys.exit is known alone."""
    job = run(tmp_path, "import gc; gc.get_referents = lambda *_: []\n" + BEFORE.format("sys.exit(3)"))
    failed(job, "left with exit code 3 (script.py:6) before it called init()")


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may mount")
def test_a_small_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import mpitrain as mt; mt.init()")
    words = f"{sys.executable} -m mpitrain run -n 2 {tmp_path}/script.py"
    job = run_command(["unshare", "-m", "bash", "-c", f"mount -t tmpfs -o size=1m tmpfs /dev/shm && {words}"])
    failed(job, "signal 7")
    if KERNEL_KEEPS_CODES:
        assert "/dev/shm, in which MPI keeps memory, may be too small: it has 1 MiB, " in job.stderr, job.output


def test_an_interrupt_that_the_program_raises_has_its_place() -> None:
    job = run_job(2, others_and(1, "raise KeyboardInterrupt", "barrier"))
    failed(job, "interrupted in ", ".py:")


RECORDED = """
import sys
import mpitrain as mt
from mpitrain.cli.new_project.train import build

class Bang(mt.Hook):
    def after_step(self, trainer, step):
        if trainer.world.rank == 1 and step.number == 3:
            exec(sys.argv[2])

mt.Trainer(build, [mt.StopAtStep(9), Bang(), mt.Record([mt.writers.JsonLines(sys.argv[1])], steps=5)]).run()
"""


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("raise ValueError('bang')", "failed: ValueError: bang"),
        ("trainer.report({'own': 1.0})", "a row of the record for own, which every rank must report"),
    ],
)
def test_the_record_says_why_another_rank_has_failed(tmp_path: Path, ending: str, text: str) -> None:
    failed(run(tmp_path, RECORDED, 2, str(tmp_path / "run"), ending))
    assert text in (tmp_path / "run/run.json").read_text()
