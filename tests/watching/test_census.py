"""The order in which the real processes of a roll call end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from jobs import KERNEL_KEEPS_CODES, until
from mpitrain.watching.census import Census, FirstEnd, WatchedProcess, is_readable, open_process
from mpitrain.watching.rank_record import BEGUN
from mpitrain.watching.view import Idleness

# Starts ranks as its children, prints their process ids, and stays.
PARENT = """
import os, subprocess, sys
path, numbers = sys.argv[1], sys.argv[2:]
for number in numbers:
    child = subprocess.Popen([sys.executable, "-c", os.environ["RANK"], path, number])
    print(number, child.pid, flush=True)
sys.stdin.read()
"""
RANK = """
import os, sys, time
from mpitrain.watching.activity import publish
from mpitrain.watching.rank_record import BEGUN, DONE, PARTED, WAITS
activity = publish(int(sys.argv[2]))
activity.begin_step(int(sys.argv[2]) + 10)
activity.enter({8: PARTED, 6: DONE}.get(int(sys.argv[2]), BEGUN))
if sys.argv[2] == "7":
    activity.lose((4, 5))
activity.begin(WAITS, "mean", 1.0)
if int(sys.argv[2]) == 9 and os.fork() == 0:
    time.sleep(1000)
activity.appear(sys.argv[1])
time.sleep(1000)
"""
# No kernel has a system call of this number.
OLD_KERNEL = "from mpitrain.watching import roll_call; roll_call._PIDFD_OPEN = 1 << 20"


class Job:
    """Ranks under parents, and the census of them."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self._stack = path, stack
        self.census = Census(str(path))
        self.pids: dict[int, int] = {}
        stack.callback(self.census.close)

    def start(self, *numbers: int) -> subprocess.Popen[str]:
        """Start a process that has these ranks as children."""
        command = [sys.executable, "-c", PARENT, str(self.path), *map(str, numbers)]
        environment = {**os.environ, "RANK": RANK}
        pipe = subprocess.PIPE
        parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True, start_new_session=True)
        self._stack.callback(end, parent)
        for _ in numbers:
            number, pid = parent.stdout.readline().split()
            self.pids[int(number)] = int(pid)
        self.until(lambda: {view.record.rank for view in self.census.views()} >= set(numbers))
        return parent

    def until(self, there: Callable[[], bool]) -> None:
        """Look until a condition holds."""
        until(lambda: self.census.look() or there())

    def kill(self, pid: int) -> None:
        """Kill a process, and wait until it has gone or is a zombie. The census does not look meanwhile."""
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())

    def kill_in_turn(self, *ranks: int) -> None:
        """Kill ranks, each when the end of the one before has been seen."""
        for rank in ranks:
            self.kill(self.pids[rank])
            self.until(lambda rank=rank: rank in self.ended)

    def first_end(self) -> FirstEnd:
        first = self.census.first_end()
        assert first is not None
        return first

    @property
    def ended(self) -> list[int]:
        """The ranks that have ended."""
        return [view.record.rank for view in self.census.views() if view.ended_seconds is not None]


def end(parent: subprocess.Popen[str]) -> None:
    """End a process and all processes below it."""
    with suppress(ProcessLookupError):  # the test has ended it
        os.killpg(parent.pid, signal.SIGKILL)
    parent.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job, in a folder whose name is too long for a socket."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with ExitStack() as stack:
        yield Job(folder / "roll_call", stack)


def test_who_ended_first_and_what_it_had_said(job: Job) -> None:
    job.start(0, 1, 2, 3)
    assert job.census.first_end() is None
    before = time.monotonic()
    for rank in (2, 0, 3):
        job.kill(job.pids[rank])
    job.until(lambda: job.ended == [0, 2, 3])
    first = job.first_end()
    assert (first.rank, first.parent_of) == (2, ())
    assert before - 0.01 < first.seconds < time.monotonic()  # the kernel counts ticks, of up to 10 ms
    views = job.census.views()
    assert [(view.record.phase, view.record.step, view.pid) for view in views] == [
        (BEGUN, rank + 10, job.pids[rank]) for rank in range(4)
    ]
    assert not any(view.is_orphan for view in views)


def test_the_first_of_two_hosts_is_the_first_though_its_agent_looks_late(tmp_path: Path) -> None:
    """As on a busy host: mpiexec has meanwhile ended the rank of the other host, whose agent has seen that end."""
    with ExitStack() as stack:
        busy, other = (Job(tmp_path / name, stack) for name in ("busy", "other"))
        busy.start(0)
        other.start(1)
        before = time.monotonic()
        busy.kill(busy.pids[0])
        time.sleep(0.3)
        other.kill(other.pids[1])
        other.until(lambda: other.ended == [1])
        time.sleep(0.3)
        busy.until(lambda: busy.ended == [0])
        first, second = busy.first_end(), other.first_end()
        assert before - 0.02 < first.seconds < second.seconds - 0.25  # two ticks of the kernel


def test_a_child_of_a_rank_does_not_hide_its_end(job: Job) -> None:
    """The child has all files open that the rank had at the fork. Only the rank has its later files."""
    job.start(9, 1)
    job.kill(job.pids[9])
    job.kill(job.pids[1])
    job.until(lambda: job.ended == [1, 9])
    assert job.first_end().rank == 9


@pytest.mark.parametrize(("rank", "is_to_blame"), [(8, False), (6, True)])
def test_a_rank_at_its_end(job: Job, rank: int, is_to_blame: bool) -> None:
    """Rank 8 had come to its end. Rank 6 waits there for the others: mpiexec ends them because of it."""
    job.start(rank, 1)
    job.kill_in_turn(rank, 1)
    assert job.first_end().rank == (rank if is_to_blame else 1)


def test_a_rank_that_the_others_go_on_without_is_not_to_blame(job: Job) -> None:
    job.start(7, 4, 1)
    job.kill_in_turn(4)
    assert job.census.first_end() is None
    job.kill_in_turn(1)
    assert job.first_end().rank == 1
    assert [view.record.lost for view in job.census.views()] == [(), (), (4, 5)]


def test_what_had_started_the_ranks_ended_first(job: Job) -> None:
    """A rank counts as an orphan after one second. At a job's end all ranks are orphans for a moment."""
    job.start(3)
    parent = job.start(0, 1)
    begun = time.monotonic()
    job.kill(parent.pid)
    parent.wait()
    job.until(lambda: job.census.first_end() is not None)
    job.until(lambda: sum(view.is_orphan for view in job.census.views()) == 2)
    assert time.monotonic() - begun > 0.9
    assert [view.record.rank for view in job.census.views() if view.is_orphan] == [0, 1]
    job.kill_in_turn(1, 0, 3)
    assert not any(view.is_orphan for view in job.census.views())
    first = job.first_end()
    assert (first.rank, first.parent_of) == (None, (0, 1))


def test_for_how_long_a_rank_has_waited(job: Job) -> None:
    """Since the time at which, by its record, the wait began; here that is the boot of this machine."""
    job.start(0)
    before = time.monotonic()
    (view,) = job.census.views()
    assert round(before - 1.0, 3) <= view.seconds <= round(time.monotonic() - 1.0, 3)


def test_who_had_ended_before_anybody_looked_is_not_known(job: Job) -> None:
    job.start(0)
    program = RANK.replace("time.sleep(1000)", "print('there', flush=True); time.sleep(1000)")
    command = [sys.executable, "-c", program, str(job.path), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as late:
        assert late.stdout.readline() == "there\n"
        job.kill(job.pids[0])
        job.kill(late.pid)
    job.until(lambda: job.ended == [0, 1])
    assert job.census.first_end() is None


def test_hundreds_of_ranks(job: Job) -> None:
    """Descriptors are then above 1023, which select() does not accept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1100:
        pytest.skip(f"at most {hard} files can be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1023:
            opened.append(os.dup(opened[0]))
        job.start(0, 1)
        job.kill_in_turn(1)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    first = job.first_end()
    assert first.rank == 1


@pytest.mark.parametrize("kernel_has_them", [True, False])
def test_a_python_without_descriptors_of_processes(
    job: Job, kernel_has_them: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was built on an old kernel. If it runs on one too, the order of ends is unknown."""
    old = "import os; del os.pidfd_open" if kernel_has_them else OLD_KERNEL
    monkeypatch.setitem(globals(), "RANK", f"{old}\n{RANK}")
    job.start(0, 1)
    job.kill_in_turn(1)
    if kernel_has_them:
        assert (job.first_end().rank, job.first_end().pid) == (1, job.pids[1])
    else:
        assert job.census.first_end() is None


FORGETS = pytest.mark.skipif(not KERNEL_KEEPS_CODES, reason="this kernel tells an exit code once; Linux 6.15 keeps it")


@pytest.mark.parametrize("is_late", [False, pytest.param(True, marks=FORGETS)])
@pytest.mark.parametrize(("end", "code"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", -9)])
def test_an_exit_code(end: str, code: int, is_late: bool) -> None:
    with subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE) as child:
        descriptor = open_process(child.pid)
        process = WatchedProcess(child.pid, descriptor)
        child.stdin.close()
        until(lambda: is_readable(descriptor))
        if is_late:
            child.wait()
        process.note_code()
    assert process.code == code


FOREIGN = """
import os, sys
from mpitrain.error_file import write_error
from mpitrain.watching.roll_call import appear
errors = os.memfd_create("errors")
appear(sys.argv[1], int(sys.argv[2]), errors=errors)
name = f"/proc/{os.getpid()}/fd/{errors}"
print("there", flush=True)
sys.stdin.readline()
if sys.argv[2] != "0":
    write_error(name, f"OSError: of rank {sys.argv[2]}", "a traceback")
    write_error(name, "the second one", "")
sys.exit(int(sys.argv[2]))
"""


def test_the_error_files_of_ranks_that_never_call_init(job: Job) -> None:
    """One that has left with code 0 is not the first end. One that ends well has not failed, whatever it wrote."""
    pipe, ranks = subprocess.PIPE, []
    for number in range(2):
        command = [sys.executable, "-c", FOREIGN, str(job.path), str(number)]
        ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        assert ranks[-1].stdout.readline() == "there\n"
    job.until(lambda: len(job.census.views()) == 2)
    begun = time.monotonic()
    for number, rank in enumerate(ranks):
        rank.communicate("\n")
        job.until(lambda number=number: job.census.views()[number].ended_seconds is not None)
    left, failed = job.census.views()
    assert (left.record.phase, left.traceback) == ("started", "")
    assert (failed.record.phase, failed.record.error, failed.traceback) == (
        "failed",
        "OSError: of rank 1",
        "a traceback",
    )
    assert begun - 0.1 <= failed.record.failed_seconds <= time.monotonic()
    assert job.census.first_end().rank == (1 if KERNEL_KEEPS_CODES else 0)


BUSY = "while True: pass"
IDLE = "import time; time.sleep(1000)"
# It waits for the child that loads its data.
LOADS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
# Such as what collects metrics: another program.
OTHERS = "import subprocess; subprocess.run(['sh', '-c', 'while :; do :; done'])"
READS = "import os, time\nwhile True: open('/proc/self/stat').read(); time.sleep(0.02)"


@pytest.mark.parametrize(
    ("source", "is_idle"), [(IDLE, True), (OTHERS, True), (BUSY, False), (LOADS, False), (READS, False)]
)
def test_a_process_that_uses_no_processor(source: str, is_idle: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", source], start_new_session=True)
    try:
        idleness, looks = Idleness(), []
        deadline = time.monotonic() + (60.0 if is_idle else 6.0)
        while time.monotonic() < deadline and (not looks or looks[-1] < 3.0):
            time.sleep(0.5)
            looks.append(idleness.look(process.pid))
        assert (looks[-1] >= 3.0) == is_idle, looks
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
