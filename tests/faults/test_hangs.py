"""Jobs that stand still: mpitrain names the rank to blame and ends the job, and nothing of the job is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import training
from faults.conftest import Undisturbed
from faults.failing import HERE, launched, nightly
from faults.outcome import failed, report_of, succeeded
from jobs import Job, run_job, until

HOST = re.escape(HERE)
# Far above the time that healthy ranks wait for each other, even on a busy machine.
LIMITS = {"MPITRAIN_STALL_SECONDS": "5", "MPITRAIN_HANG_SECONDS": "15"}

START = """
import os, pathlib, signal, subprocess, sys, tempfile, time
import mpitrain as mt
world = mt.init()
"""
# Each rank except the first and the last stands still in a different way.
STAND = (
    START
    + """
def load():
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while world.rank == 2:
        pass
    if world.rank == 3:
        time.sleep(1000)
    if world.rank == 4:
        # The child opens a pipe that nobody writes to, before it becomes a program; until then its parent waits in the
        # kernel, as for a disk: state D.
        os.mkfifo(sys.argv[1])
        opens = [(os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)]
        os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=opens)
world.barrier()
if 0 < world.rank < 5:
    load()
world.barrier()
"""
)


def run(folder: Path, ranks: int, source: str, *arguments: str, **limits: str) -> Job:
    """It must leave nothing."""
    job = launched(folder, source, ranks, "--hosts", "localhost", words=arguments, env=LIMITS | limits)
    assert job.left == []
    return job


def ended(job: Job, stands: str, seconds: int = 15) -> re.Match[str]:
    """The job was reported, and then ended, with these words about its ranks. Return where it was ended."""
    assert job.code == 1, job.output
    heads = [r"no progress for \d+ s", rf"nothing has moved for {seconds} s \(hang_seconds\), and the job is ended"]
    found = [re.search(rf"^mpitrain: {head}: {stands}", job.stderr, re.M) for head in heads]
    assert all(found), job.output
    assert found[1] is not None
    return found[1]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))  # noqa: PTH208 (names are wanted)


def test_every_rank_that_stands_still_is_named_and_the_job_is_ended(tmp_path: Path) -> None:
    job = run(tmp_path, 6, STAND, str(tmp_path / "pipe"))
    stuck = "does a disk or a network file system not answer"
    expected = "; ".join(
        [
            rf"ranks 0,5 on {HOST} wait in barrier \(call \d+\)",
            rf"rank 1 on {HOST} is stopped \(SIGSTOP\?\): kill -CONT \d+",
            rf"rank 2 on {HOST} runs in script\.py:\d+ \(load\), after call \d+",
            rf"rank 3 on {HOST} sleeps in script\.py:12 \(load\), after call \d+",
            rf"rank 4 on {HOST} is stuck in the kernel \(\w+\) in script\.py:18 \(load\): {stuck}\?\n",
        ]
    )
    # This message is the last one. Only stacks come after it.
    after = job.stderr[ended(job, expected).end() :].splitlines()
    assert all(line.startswith("mpitrain:     ") for line in after), job.output
    assert f"mpitrain:     rank 2 on {HERE}, most recent call first:" in after


IN_INIT = """
import os, signal, sys, time
import mpitrain as mt
import mpitrain.job.start as start

def make_world(comm):
    if comm.rank == 1:
        HOLD
    return made(comm)

made, start.make_world = start.make_world, make_world
mt.init()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hold", "expected"),
    [
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            rf"ranks 0,2 on {HOST} wait in init\(\); rank 1 on {HOST} is stopped in init\(\) .*: kill -CONT \d+\n",
        ),
        (
            "while True: time.sleep(0.01)",  # as if MPI itself stood still: each rank waits for the others
            rf"ranks 0-2 on {HOST} wait in init\(\); all ranks are there, on one machine: is the load too high.*\n",
        ),
    ],
)
def test_a_job_that_stands_in_init_is_ended(tmp_path: Path, hold: str, expected: str) -> None:
    """After a minute, because a cold start takes long. Before, it is reported."""
    job = run(tmp_path, 3, IN_INIT.replace("HOLD", hold))
    ended(job, expected, 60)
    assert "in make_world" in job.stderr  # the stack of a rank that waits


@pytest.mark.nightly
def test_a_rank_that_stands_behind_its_wait_in_init(tmp_path: Path) -> None:
    """All ranks have come, so the limit of any wait counts."""
    stand = "os.sched_getaffinity = lambda _: time.sleep(1000)"
    job = run(tmp_path, 3, START.replace("world =", f"if os.environ['PMI_RANK'] == '1':\n    {stand}\nworld ="))
    ended(job, rf"ranks 0,2 on {HOST} wait in allgather \(call \d+\); rank 1 on {HOST} sleeps in script.py:5")


@pytest.mark.nightly
def test_the_limit_of_the_user_never_counts_for_the_wait_in_init(tmp_path: Path) -> None:
    """MPI may take longer to start. The test sees all that the ranks publish, as an agent may see it."""
    source = """
import mpitrain as mt
from mpitrain.watching.activity import Activity

published = set()

def write(activity):
    written(activity)
    doing = [words for _, words, _ in activity._doing]
    published.add(("init()" in doing, activity.hang_seconds))

written, Activity._write = Activity._write, write
world = mt.init()
assert {(True, 60.0), (False, 15.0)} <= published, published
assert (True, 15.0) not in published, published
"""
    succeeded(run(tmp_path, 2, source))


@pytest.mark.nightly
def test_what_a_program_does_before_init_ends_no_job(tmp_path: Path) -> None:
    """The others wait for it in init()."""
    late = "if os.environ['PMI_RANK'] == '1':\n    time.sleep(75)\n"
    job = run(tmp_path, 2, START.replace("world =", f"{late}world ="))
    succeeded(job)
    sleeps = rf"rank 1 on {HOST} sleeps in script\.py:5 \(<module>\)\n"
    assert re.search(rf"no progress for \d+ s: rank 0 on {HOST} waits in init\(\); {sleeps}", job.stderr), job.output


@pytest.mark.nightly
def test_a_wait_for_a_communicator(tmp_path: Path) -> None:
    """Only MPI can drive it, so the rank looks like one that works."""
    source = START + (
        "world.barrier()\nif world.rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1)\nworld.apart()"
    )
    job = run(tmp_path, 2, source)
    ended(job, rf"rank 0 on {HOST} waits in apart \(call \d+\); rank 1 on {HOST} is stopped")


def test_under_a_bare_mpiexec_the_ranks_see_to_it() -> None:
    source = START + "world.barrier()\nif world.rank == 1:\n    world.recv(source=2)\nworld.barrier()"
    job = run_job(3, source, env=LIMITS)
    waits = (
        rf"ranks 0,2 on {HOST} wait in barrier \(call \d+\); rank 1 on {HOST} waits in recv from rank 2 on {HOST} "
        r"\(call \d+\); they wait for each other: do all ranks make the same calls in the same order\?"
    )
    reported = [
        int(seconds) for seconds in re.findall(rf"^mpitrain: no progress for (\d+) s: {waits}$", job.stderr, re.M)
    ]
    assert reported and min(reported) >= 5, job.output
    assert len(set(reported)) == len(reported), job.output  # one of the ranks reports it
    report = report_of(job, "MpitrainError: ")
    assert re.search(rf"nothing has moved for 15 s \(hang_seconds\), and the job is ended: {waits}$", report.text, re.M)


@pytest.mark.nightly
def test_what_the_others_are_to_wait_for_ends_no_job(tmp_path: Path) -> None:
    source = START + "with world.together('save it'):\n    time.sleep(20 if world.is_root else 0)\nprint('saved')"
    job = run(tmp_path, 2, source, MPITRAIN_STALL_SECONDS="5", MPITRAIN_HANG_SECONDS="10")
    succeeded(job)
    expected = rf"rank 0 on {HOST} is in save it, for which the others wait by design, now in script\.py:6 \(<module>\)"
    assert re.search(expected, job.stderr), job.output


@pytest.mark.nightly
def test_nothing_is_ended_while_messages_move(tmp_path: Path) -> None:
    """A slow rank makes one exchange longer than all limits. The number of MiB for this depends on the machine."""
    source = START + (
        "import numpy\nfrom mpitrain.allreduce import make_algorithm\nalgorithm = make_algorithm(world, 'ring')\n"
        "took, mib = 0.0, 60\n"
        "while took < 7.5 and mib < 1000:\n"
        "    mib *= 2\n"
        "    flat = algorithm.allocate(2**18 * mib, numpy.dtype(numpy.float32))\n"
        "    flat[:] = 1\n"
        "    begun = time.monotonic()\n"
        "    handle = algorithm.start(flat)\n"
        "    while world.rank == 1 and not handle.test():\n        time.sleep(1.5)\n"
        "    handle.wait()\n"
        "    took = world.broadcast_object(time.monotonic() - begun)\n"
        "    assert flat.min() == flat.max() == 2\n"
        "world.print('took', took)"
    )
    job = run(tmp_path, 2, source, MPITRAIN_STALL_SECONDS="2.5", MPITRAIN_HANG_SECONDS="5")
    succeeded(job)
    assert float(job.stdout.split()[-1]) >= 7.5, job.output
    assert "the job is ended" not in job.stderr, job.output


@pytest.mark.parametrize("allocates", [True, *nightly(False)])
def test_nothing_is_reported_while_arrays_are_added_in_shared_memory(tmp_path: Path, allocates: bool) -> None:
    """The ranks add block by block, which takes much longer than the limit."""
    source = START + (
        "import numpy\nfrom mpitrain.allreduce import make_algorithm\n"
        "shared_memory = sys.modules['mpitrain.allreduce.shared_memory']\n"
        "add_block = shared_memory.add_block\n"
        "shared_memory.add_block = lambda *arguments: (time.sleep(0.2), add_block(*arguments))\n"
        "algorithm = make_algorithm(world, 'shared_memory')\n"
        f"make = algorithm.allocate if {allocates} else numpy.empty\n"
        "flat = make(2**21, numpy.dtype(numpy.float32))\n"
        "flat[:] = world.rank + 1\n"
        "algorithm.start(flat).wait()\n"
        "assert flat.min() == flat.max() == 3\n"
    )
    job = run(tmp_path, 2, source, MPITRAIN_STALL_SECONDS="3")
    succeeded(job)
    assert "no progress" not in job.stderr, job.output


def test_a_launcher_that_is_killed_leaves_no_stopped_rank_and_no_shared_memory(tmp_path: Path) -> None:
    source = START + (
        "pathlib.Path(sys.argv[1]).touch() if world.is_root else None\n"
        "if world.rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\nworld.barrier()"
    )
    ready = tmp_path / "ready"
    seen: set[str] = set()

    def kill(launcher: subprocess.Popen[str]) -> None:
        until(ready.exists)
        time.sleep(1.0)
        seen.update(name for name in shared_memory() - before if _has_mapped(launcher.pid, name))
        launcher.send_signal(signal.SIGKILL)

    before = shared_memory()
    failed(launched(tmp_path, source, 2, "--hosts", "localhost", words=(str(ready),), during=kill))
    assert seen, "the ranks had no shared memory"
    until(lambda: not seen & shared_memory(), f"shared memory is left of {seen}")


def _has_mapped(ancestor: int, name: str) -> bool:
    """True if a process below `ancestor` has mapped a file of /dev/shm."""
    for folder in Path("/proc").iterdir():
        pid = int(folder.name) if folder.name.isdigit() else 0
        while pid and pid != ancestor:
            try:
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                pid = 0
        try:
            if pid and f"/dev/shm/{name}" in (folder / "maps").read_text():
                return True
        except OSError:
            continue
    return False


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A disk on which every write waits in the kernel, where even SIGKILL cannot end it."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    image.write_bytes(bytes(8 << 20))
    made = [["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder], ["fsfreeze", "--freeze", folder]]
    if os.geteuid() != 0:
        pytest.skip("to freeze a disk needs root")
    for command in made:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk can be frozen here: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", folder], check=False)
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_rank_that_cannot_be_killed(tmp_path: Path, frozen: Path, vendor: str, undisturbed: Undisturbed) -> None:
    """It is named, and the job continues from memory."""
    wrong = f"if rank == 1 and step == 7 and once('stuck'): pathlib.Path('{frozen}/file').write_text('x')"

    def thaw(process: subprocess.Popen[str]) -> None:
        """The disk answers again when the training is over. Then the process that was stuck ends."""
        until(lambda: (tmp_path / "w.npy").exists() or process.poll() is not None)
        subprocess.run(["fsfreeze", "--unfreeze", frozen], check=True)

    job = training.train(tmp_path, wrong, vendor=vendor, env=LIMITS, during=thaw)
    training.went_on(job, tmp_path, [6], undisturbed(vendor=vendor))
    stuck = rf"rank 1 on {HOST} is stuck in the kernel \(\w+\) in train\.py:\d+ \(regression\)"
    assert re.search(rf"no progress for \d+ s: rank 0 .*{stuck}", job.stderr), job.output
    assert re.search(r"process \d+ could not be killed: .*train\.py", job.stderr), job.output
    first, last = training.tries(job)
    assert re.match(r"attempt 1 of 3 failed at step 7: ", first), first
    assert last == "attempt 2 of 3 succeeded"
