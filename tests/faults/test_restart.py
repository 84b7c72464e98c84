"""`mpitrain run --restarts`: a killed training resumes from its checkpoint; one that cannot succeed ends.

Copies in memory would come first. Here the interval between them is so long that there are none; test_memory.py
tests them.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults import training
from faults.conftest import Undisturbed
from faults.failing import HERE, nightly
from faults.outcome import failed, succeeded
from faults.training import EVERY_4, result, tries
from jobs import HANG_SECONDS, VENVS, run_command, until
from mpitrain.cli import main

train = functools.partial(training.train, hooks=EVERY_4, every=1000)
HOW = r"(was killed by signal 9|ended without a word \(os\._exit, or killed\?\))"


def test_a_killed_rank(tmp_path: Path, vendor: str, undisturbed: Undisturbed) -> None:
    job = train(tmp_path, "if rank == 1 and step == 7 and once('killed'): kill()", ranks=3, vendor=vendor)
    succeeded(job)
    found = tries(job)
    assert re.fullmatch(rf"try 1 of 3 failed at step 7: rank 1 on {HERE} {HOW}; starting again on {HERE}", found[0])
    assert found[1:] == ["try 2 of 3 succeeded"]
    assert job.stdout.count("resumed from ") == 1
    assert result(tmp_path)[0] == undisturbed(3, vendor)[0]


def test_an_exception_on_a_rank(tmp_path: Path, undisturbed: Undisturbed) -> None:
    wrong = """if rank == 1 and step in (10, 15) and once(f"raised-{step}"):
        wait_for(f"checkpoints/step-{step // 4 * 4:08d}")
        raise OSError("the disk is gone")"""
    job = train(tmp_path, wrong)
    succeeded(job)
    cause = f"rank 1 on {HERE} failed: OSError: the disk is gone"
    assert tries(job) == [
        f"try 1 of 3 failed at step 10: {cause}; starting again on {HERE}",
        f"try 2 of 3, from step 8, failed at step 15: {cause}; starting again on {HERE}",
        "try 3 of 3 succeeded",
    ]
    assert result(tmp_path)[0] == undisturbed()[0]


# Rank 1 dies once in each phase of a step. Rank 0, which writes the checkpoints, dies while it writes one.
PHASES = """
import threading
from mpitrain.state import store

def dies(phase):
    at = {"data": 3, "forward": 6, "backward": 9, "exchange": 11, "update": 14}
    return rank == 1 and at[phase] == trainer.step_number + 1 and once(phase)

def around(owner, name, before=lambda *_: None, after=lambda *_: None):
    original = getattr(owner, name)
    def wrapped(*arguments):
        before(*arguments)
        result = original(*arguments)
        after(*arguments)
        return result
    setattr(owner, name, wrapped)

def wait_for_rank_1(*_):
    if rank == 0 and trainer.step_number + 1 == 11 and once("waited"):
        time.sleep(1000)
    if dies("exchange"):
        threading.Timer(0.5, kill).start()

def write(path):
    if path.name.startswith(".writing-step-00000016") and once("write"):
        while trainer.step_number < 18:
            time.sleep(0.02)
        time.sleep(1)
        die()

around(mt.data.ArrayData, "__next__", lambda *_: dies("data") and kill())
around(mt.Sync, "on_gradient", after=lambda *_: dies("backward") and kill())
around(mt.Sync, "finish_step", wait_for_rank_1)
around(mt.ArrayFunction, "apply_gradients", lambda *_: dies("update") and kill())
around(store, "_sync", write)
"""


@pytest.mark.nightly
def test_a_rank_is_killed_in_each_phase(tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = train(tmp_path, "if dies('forward'): kill()", "--restarts", "6", before=PHASES)
    succeeded(job)
    found = tries(job)
    steps = [int(step) for line in found for step in re.findall(r"failed at step (\d+): rank 1 ", line)]
    assert steps == [3, 6, 9, 11, 14]
    assert re.search(r"failed at step (19|20): rank 0 ", found[5]), job.output
    assert found[6:] == ["try 7 of 7 succeeded"]
    assert [int(step) for step in re.findall(r"resumed from .* at step (\d+)", job.stdout)] == [4, 8, 8, 12, 12]
    assert "is incomplete; it is skipped" in job.stderr
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
    assert re.match(rf"try 1 of 3 failed at step 10: .*; starting again on {HERE}$", found[0]), job.output
    assert result(tmp_path)[0] == undisturbed(vendor=vendor)[0]


@pytest.mark.nightly
def test_two_jobs_at_once(tmp_path: Path, undisturbed: Undisturbed) -> None:
    folders = tmp_path / "whole", tmp_path / "killed"
    meet = f"""if step == 5:
        once("there")
        while not all(pathlib.Path(folder, "there").exists() for folder in {[str(path) for path in folders]}):
            time.sleep(0.05)"""
    kill = "\n    if rank == 1 and step == 7 and once('killed'): kill()"
    # The job that is not killed is still running when the other one has been cleaned up and has started again.
    stay = f"""\n    while step == 6 and not pathlib.Path({str(folders[1])!r}, "w.npy").exists(): time.sleep(0.05)"""
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(train, folders[0], meet + stay)
        killed = train(folders[1], meet + kill)
        for job, num_tries in ((killed, 2), (whole.result(), 0)):
            succeeded(job)
            assert len(tries(job)) == num_tries, job.output
    assert [result(folder)[0] for folder in folders] == [undisturbed()[0]] * 2


JUMPING_CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long jump(void) {
    char text[32] = "";
    int file = open(getenv("CLOCK_JUMP"), O_RDONLY);
    if (file >= 0 && read(file, text, 31) < 0) text[0] = 0;
    if (file >= 0) close(file);
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int bad = syscall(SYS_clock_gettime, clock, now);
    if (!bad && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return bad;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec value;
    clock_gettime(CLOCK_REALTIME, &value);
    now->tv_sec = value.tv_sec;
    now->tv_usec = value.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler for the library that moves the clock")
def test_a_clock_that_jumps(tmp_path: Path, vendor: str, undisturbed: Undisturbed) -> None:
    # Every process of the job sees this clock. The clock of the machine itself does not change.
    library, jump = tmp_path / "jump.so", tmp_path / "jump"
    (tmp_path / "jump.c").write_text(JUMPING_CLOCK)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "jump.c"], check=True, timeout=HANG_SECONDS
    )
    wrong = f"""if rank == 0 and step in (5, 9) and once(f"jump-{{step}}"):
        before = time.time()
        pathlib.Path({str(jump)!r}).write_text("7200" if step == 5 else "-86400")
        assert abs(time.time() - before) > 7000
    if rank == 1 and step == 11 and once("killed"): kill()"""
    job = train(tmp_path, wrong, vendor=vendor, env={"LD_PRELOAD": str(library), "CLOCK_JUMP": str(jump)})
    succeeded(job)
    found = tries(job)
    assert len(found) == 2, job.output
    # (The guards decide which rank is named. mpiexec may be so quick that another rank has ended first.)
    assert "failed at step 11: rank " in found[0], job.output
    assert "no progress" not in job.output
    assert job.stdout.count("resumed from ") == 1
    assert result(tmp_path)[0] == undisturbed(vendor=vendor)[0]


def test_always_at_the_same_step(tmp_path: Path) -> None:
    job = train(tmp_path, "if rank == 0 and step == 10: kill() if once('killed') else os._exit(7)")
    failed(job)
    assert job.code in (7, 137), job.output  # MPICH may return the code of a rank that it has killed itself
    found = tries(job)
    assert len(found) == 3, job.output
    assert all(", from step 8, failed at step 10: " in line for line in found[1:]), job.output
    assert "not started again: 3 tries failed at step 10; examine program" in found[2]
    assert job.stdout.count("resumed from ") == 2


@pytest.mark.parametrize("source", ["import nothing_such", *nightly("mt.init(algorithm='rign')")])
def test_an_error_before_the_first_step(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(f"import mpitrain as mt\n{source}")
    command = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain", "run", "-n", "2", "--restarts", "2"]
    job = run_command([*command, str(tmp_path / "train.py")])
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
        ("--restarts 2 --min-nodes 2", "--min-nodes is 2, but the job runs on 1 host\n"),
        ("--restarts -1", "'-1' is not a whole number, 0 or above"),
        ("--restarts 0 --min-nodes 1", "--min-nodes sets the least number of hosts"),
        ("--restarts 2 --elastic 2", "'2' is not of the form MIN:MAX, as in 2:4"),
        ("--restarts 2 --elastic 3:2", "'3:2': MIN is 3 and above MAX, 2"),
        ("--restarts 2 --elastic 1:2 --min-nodes 1", "--elastic MIN:MAX sets the least number of hosts too"),
        ("--restarts 0 --elastic 1:2", "--elastic starts the job again on other hosts; it needs --restarts N"),
        ("--restarts 2 --elastic 1:2", "-n 2 sets the ranks of the whole job, whose hosts --elastic changes"),
        ("--restarts 0 --spares", "--spares keeps processes ready for a restart; it needs --restarts N"),
        ("--servers 2", "2 ranks, 2 of them servers, leave none for workers; start at least 3"),
        ("--servers 1 --restarts 1", "--servers goes without --restarts, --spares and --recover"),
        (
            "--resume 12345678 --min-nodes 1",
            "--resume goes on with the command that started the job; leave out -n, --min-nodes, SCRIPT",
        ),
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
    assert "mpitrain: try" not in said.err


# The Trainer is the first that calls init().
WITHOUT_INIT = """
import os, pathlib, signal, sys
import numpy
import mpitrain as mt

class Dies(mt.Hook):
    def after_step(self, trainer, step):
        if trainer.world.rank == 1 and step.number == 7 and not pathlib.Path("died").exists():
            pathlib.Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

def mean(parameters, batch, on_gradient):
    on_gradient("w", batch[0].mean(axis=0))
    return 0.0

def build(world):
    data = mt.data.ArrayData(world, (numpy.ones((12, 5)),), global_batch=4)
    return mt.Parts(mt.ArrayFunction(mean, {"w": numpy.zeros(5)}, mt.optim.SGD(0.1)), mt.Sync(), data)

mt.Trainer(build, [mt.StopAtStep(9), Dies()]).run()
"""


def test_a_script_without_init(tmp_path: Path) -> None:
    """Its steps are known to the launcher. A try without a step would not be followed by another one."""
    (tmp_path / "train.py").write_text(WITHOUT_INIT)
    command = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain", "run", "-n", "2", "--restarts", "1", "train.py"]
    job = run_command(command, cwd=tmp_path, env={"MPITRAIN_MEMORY_STEPS": "1"})
    succeeded(job)
    first, last = tries(job)
    assert first.startswith("try 1 of 2 failed at step 7: rank 1 on ")
    assert last == "try 2 of 2 succeeded"
