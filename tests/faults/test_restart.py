"""`mpitrain run --max-restarts`: a killed training resumes from its checkpoint; one that cannot succeed ends.

Copies in memory would come first. Here the interval between them is so long that there are none; test_memory.py
tests them.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from faults import training
from faults.conftest import Undisturbed
from faults.failing import HERE, launched, nightly
from faults.outcome import failed, succeeded
from faults.training import EVERY_4, result, tries
from jobs import until
from mpitrain.cli import main

train = functools.partial(training.train, hooks=EVERY_4, every=1000)
HOW = r"(was killed by signal 9|ended without a message \(os\._exit, or killed\?\))"


def test_a_killed_rank(tmp_path: Path, vendor: str, undisturbed: Undisturbed) -> None:
    job = train(tmp_path, "if rank == 1 and step == 7 and once('killed'): kill()", ranks=3, vendor=vendor)
    succeeded(job)
    found = tries(job)
    assert re.fullmatch(rf"attempt 1 of 3 failed at step 7: rank 1 on {HERE} {HOW}; starting again on {HERE}", found[0])
    assert found[1:] == ["attempt 2 of 3 succeeded"]
    assert job.stdout.count("resumed from ") == 1
    assert result(tmp_path)[0] == undisturbed(3, vendor)[0]


# As if nobody had said how often the job may start again.
UNSAID = """
import sys
from dataclasses import replace
from mpitrain.cli import main
from mpitrain.launch import start as its
start = its.start
its.start = lambda request: start(replace(request, limits=its.Limits(None)))
sys.exit(main())
"""


@pytest.mark.parametrize(("every", "hooks"), [(1000, EVERY_4), *nightly((1, "[]"), (1000, "[]"))])
def test_a_job_with_a_checkpoint_starts_again_by_itself(tmp_path: Path, every: int, hooks: str) -> None:
    """The checkpoint is on disk, or in memory, or there is none."""
    (tmp_path / "launcher.py").write_text(UNSAID)
    wrong = "if rank == 1 and step == 7 and once('killed'): kill()"
    job = training.train(tmp_path, wrong, every=every, hooks=hooks, launcher=[str(tmp_path / "launcher.py")])
    if (every, hooks) == (1000, "[]"):
        failed(job)
        assert tries(job) == [], job.output
    else:
        succeeded(job)
        assert tries(job)[1:] == ["attempt 2 of 4 succeeded"], job.output


@pytest.mark.nightly
def test_an_exception_on_a_rank(tmp_path: Path, undisturbed: Undisturbed) -> None:
    wrong = """if rank == 1 and step in (10, 15) and once(f"raised-{step}"):
        wait_for(f"checkpoints/step-{step // 4 * 4:08d}")
        raise OSError("the disk is gone")"""
    job = train(tmp_path, wrong)
    succeeded(job)
    cause = f"rank 1 on {HERE} failed: OSError: the disk is gone"
    assert tries(job) == [
        f"attempt 1 of 3 failed at step 10: {cause}; starting again on {HERE}",
        f"attempt 2 of 3, from step 8, failed at step 15: {cause}; starting again on {HERE}",
        "attempt 3 of 3 succeeded",
    ]
    assert result(tmp_path)[0] == undisturbed()[0]


@pytest.mark.parametrize(
    ("vendor", "parent"),
    [("mpich", "daemon"), *nightly(("mpich", "mpiexec"), ("openmpi", "mpiexec"))],
    indirect=["vendor"],
)
def test_what_started_the_ranks_is_killed(tmp_path: Path, vendor: str, parent: str, undisturbed: Undisturbed) -> None:
    # The parent of a rank is MPICH's daemon (Hydra's proxy, whose parent is mpiexec), or mpiexec itself.
    above = parent == "mpiexec" and vendor == "mpich"
    wrong = f"""if rank == 0 and step == 10 and once("killed"):
        pid = os.getppid()
        if {above}:
            pid = int(pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid, signal.SIGKILL)
        time.sleep(100)"""
    job = train(tmp_path, wrong, vendor=vendor)
    succeeded(job)
    found = tries(job)
    assert len(found) == 2, job.output
    assert re.match(rf"attempt 1 of 3 failed at step 10: .*; starting again on {HERE}$", found[0]), job.output
    assert result(tmp_path)[0] == undisturbed(vendor=vendor)[0]


# Every Python of the job sees this clock, also the launcher's.
JUMPING_CLOCK = """
import pathlib, sys, time
jump, its = pathlib.Path({!r}), time.time
time.time = lambda: its() + float(jump.read_text() if jump.exists() else 0)
"""


@pytest.mark.nightly
def test_a_clock_that_jumps(tmp_path: Path, vendor: str, undisturbed: Undisturbed) -> None:
    clock = JUMPING_CLOCK.format(str(tmp_path / "jump"))
    (tmp_path / "launcher.py").write_text(f"{clock}from mpitrain.cli import main\nsys.exit(main())")
    wrong = """if rank == 0 and step in (5, 9) and once(f"jump-{step}"):
        before = time.time()
        jump.write_text("7200" if step == 5 else "-86400")
        assert abs(time.time() - before) > 7000
    if rank == 1 and step == 11 and once("killed"): kill()"""
    job = train(tmp_path, wrong, vendor=vendor, first=clock, launcher=[str(tmp_path / "launcher.py")])
    succeeded(job)
    found = tries(job)
    assert len(found) == 2, job.output
    # (The agents decide which rank is named. mpiexec may be so quick that another rank has ended first.)
    assert "failed at step 11: rank " in found[0], job.output
    assert "no progress" not in job.output
    assert job.stdout.count("resumed from ") == 1
    assert result(tmp_path)[0] == undisturbed(vendor=vendor)[0]


@pytest.mark.nightly
def test_always_at_the_same_step(tmp_path: Path) -> None:
    job = train(tmp_path, "if rank == 0 and step == 10: kill() if once('killed') else os._exit(7)")
    failed(job)
    assert job.code in (7, 137), job.output  # MPICH may return the code of a rank that it has killed itself
    found = tries(job)
    assert len(found) == 3, job.output
    assert all(", from step 8, failed at step 10: " in line for line in found[1:]), job.output
    assert "not started again: 3 attempts failed at step 10; examine program" in found[2]
    assert job.stdout.count("resumed from ") == 2


@pytest.mark.parametrize("source", ["import nothing_such", *nightly("mt.init(algorithm='rign')")])
def test_an_error_before_the_first_step(tmp_path: Path, source: str) -> None:
    job = launched(tmp_path, f"import mpitrain as mt\n{source}", 2, "--max-restarts", "2")
    failed(job, "not started again: it failed before its first step, and would fail again")
    assert len(tries(job)) == 1, job.output


@pytest.mark.parametrize("number", [signal.SIGINT, *nightly(signal.SIGTERM)])
def test_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    def interrupt(process: subprocess.Popen[str]) -> None:
        until((tmp_path / "there").exists)
        os.kill(process.pid, number)

    wrong = "if step == 10:\n        once('there')\n        time.sleep(100)"
    job = train(tmp_path, wrong, during=interrupt)
    failed(job)
    assert job.code == 128 + number, job.output
    assert tries(job) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--max-restarts 2 --nnodes 2", "--nnodes is 2, but the job runs on 1 host\n"),
        ("--max-restarts -1", "'-1' is not a whole number, 0 or above"),
        ("--nnodes 2:", "'' is not a whole number above 0"),
        ("--max-restarts 2 --nnodes 3:2", "'3:2': MIN is 3, which is above MAX, 2"),
        (
            "--max-restarts 0 --nnodes 1:2",
            "--nnodes 1:2 starts the job again when its hosts change, and --max-restarts 0",
        ),
        ("--max-restarts 2 --nnodes 1:2", "-n 2 sets the ranks of the whole job, whose hosts --nnodes chooses"),
        (
            "--spares",
            "--spares is now part of every job that may start again: leave it out",
        ),
        ("--servers 2", "2 ranks, 2 of them servers, leave none for workers; start at least 3"),
        ("--servers 1 --max-restarts 1", "--servers goes without --max-restarts, --nnodes and --recover"),
    ],
)
def test_wrong_options(options: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["run", "-n", "2", *options.split(), __file__])
    except SystemExit as end:  # argparse refuses it
        code = end.code
    assert code == 2
    said = capfd.readouterr()
    assert message in said.err
    assert "attempt 1" not in said.err


@pytest.mark.nightly
def test_a_script_without_init(tmp_path: Path) -> None:
    """Its Trainer is the first that calls init(). An attempt whose steps are not known has no successor."""
    source = training.source("if rank == 1 and step == 7 and once('killed'): die()")
    source = source.replace("world = mt.init()\nrank = world.rank\n", "rank = int(os.environ['PMI_RANK'])\n")
    job = launched(
        tmp_path, source.replace("world.is_root", "rank == 0"), 2, "--max-restarts", "1", words=(str(tmp_path),)
    )
    succeeded(job)
    first, last = tries(job)
    assert first.startswith("attempt 1 of 2 failed at step 7: rank 1 on ")
    assert last == "attempt 2 of 2 succeeded"
