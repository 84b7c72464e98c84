"""`mpitrain run --max-restarts N --spares`: processes that wait in init() become the ranks of the next attempt."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from faults import training
from faults.conftest import Undisturbed
from faults.failing import HERE, nightly
from faults.outcome import failed, succeeded
from faults.training import result, tries
from jobs import TOKEN, VENVS, Job, until
from keeping import drop_kept

During = Callable[[subprocess.Popen[str], Callable[[str], int]], None]
# Variables that mpiexec gives to a rank, and that a spare does not have.
RANK = {b"PMI_RANK", b"OMPI_COMM_WORLD_RANK"}

# Every process, rank or spare, leaves a file with its number before init(). A rank leaves another one after init().
BEFORE_INIT = """
print("begins")
(folder / f"began-{os.getpid()}").touch()
def restarted():  # the training runs, and nobody has let it continue yet
    return (folder / "trains").exists() and not (folder / "killed").exists()
"""
AFTER_INIT = "(folder / f'rank-{rank}-{os.getpid()}').touch()"
# A training rank waits at a step until the test lets it continue, and is killed there.
KILL = """if rank == 1 and step == {step} and once("kill-{step}"):
        once("trains")
        wait_for("go-{step}")
        (folder / "killed").touch()
        kill()
"""
KILL_7 = KILL.format(step=7)
STAYS = KILL_7 + "    if step == 10 and once('there'): time.sleep(100)"


def train(
    folder: Path, wrong: str, *options: str, at_start: str = "", during: During | None = None, **how: object
) -> Job:
    """Run the training with spares. `during` gets a function that says how often stderr has a text."""
    errors = folder / "stderr"
    errors.touch()
    begins = {"first": BEFORE_INIT + at_start, "before": AFTER_INIT}
    # With `exec`, a signal to the process goes to the launcher.
    told = ["-c", f"import os, sys; os.dup2(os.open({str(errors)!r}, os.O_WRONLY), 2); "]
    told[1] += "os.execv(sys.executable, [sys.executable, '-m', 'mpitrain', *sys.argv[1:]])"
    waits = None if during is None else lambda process: during(process, lambda text: errors.read_text().count(text))
    job = training.train(folder, wrong, "--spares", *options, launcher=told, during=waits, **begins, **how)
    return Job(job.code, job.stdout, errors.read_text(), job.left)


def processes(process: subprocess.Popen[str]) -> dict[int, list[bytes]]:
    """The processes of a started job, each with its variables."""
    variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    mark = next(one for one in variables if one.startswith(f"{TOKEN}=".encode()))
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            of_it = (entry / "environ").read_bytes().split(b"\0")
            if mark in of_it:
                found[int(entry.name)] = of_it
    return found


def spares(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the job that are still spares."""
    named = {pid: {one.partition(b"=")[0] for one in variables} for pid, variables in processes(process).items()}
    return [pid for pid, names in named.items() if b"_MPITRAIN_SPARE" in names and not RANK & names]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def let_go(folder: Path) -> During:
    """Let the training kill a rank when all spares are ready, and wait until spares train."""

    def during(_: subprocess.Popen[str], said: Callable[[str], int]) -> None:
        until(lambda: said("2 spares are ready"))
        (folder / "go-7").touch()
        until((folder / "there").exists)

    return during


def ranks_of(folder: Path) -> set[int]:
    """The processes that were ranks."""
    return {int(path.name.split("-")[2]) for path in folder.glob("rank-*")}


def printed(stdout: str, line: str) -> Counter[int]:
    """How often each rank printed this line. mpitrain prints equal lines once, with the ranks in front."""
    found: Counter[int] = Counter()
    for named in re.findall(rf"^\[([\d,-]+)\] {line}$", stdout, re.M):
        for first, _, last in (part.partition("-") for part in named.split(",")):
            found.update(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize(
    ("vendor", "ranks", "steps"),
    [("mpich", 2, [7]), *nightly(("mpich", 3, [7, 13]), ("openmpi", 3, [7, 13]))],
    indirect=["vendor"],
)
def test_killed_ranks(tmp_path: Path, vendor: str, ranks: int, steps: list[int], undisturbed: Undisturbed) -> None:
    """Spares become the ranks. The second kill hits such a spare."""
    begun: list[set[int]] = []

    def during(process: subprocess.Popen[str], said: Callable[[str], int]) -> None:
        for number, step in enumerate(steps, 1):
            until(lambda number=number: said(f"{ranks} spares are ready") == number)
            begun.append(set(spares(process)))
            (tmp_path / f"go-{step}").touch()

    wrong = "\n    ".join(KILL.format(step=step) for step in steps)
    job = train(tmp_path, wrong, ranks=ranks, vendor=vendor, during=during)
    succeeded(job)
    assert result(tmp_path)[0] == undisturbed(ranks, vendor)[0]
    lives = len(steps) + 1
    assert len(ranks_of(tmp_path)) == ranks * lives
    assert [len(one) for one in begun] == [ranks] * len(steps)
    assert set.union(*begun) < ranks_of(tmp_path)
    assert printed(job.stdout, "begins") == dict.fromkeys(range(ranks), lives), job.output
    *killed, last = tries(job)
    assert last == f"attempt {lives} of 3 succeeded"
    # mpiexec may name a rank that it has ended itself.
    how = rf"rank 1 on {HERE} (was killed by signal 9|ended without a message \(os\._exit, or killed\?\))"
    for number, (step, line) in enumerate(zip(steps, killed, strict=True), 1):
        since = "" if number == 1 else ", from step 6,"
        assert re.fullmatch(
            rf"attempt {number} of 3{since} failed at step {step}: {how}; starting again on {HERE}", line
        )


@pytest.mark.nightly
def test_no_spare_is_ready(tmp_path: Path, undisturbed: Undisturbed) -> None:
    job = train(tmp_path, "if rank == 1 and step == 7 and once('killed'): kill()")
    succeeded(job)
    assert result(tmp_path)[0] == undisturbed()[0]
    assert len(tries(job)) == 2, job.output


def stop(process: subprocess.Popen[str], _: Path) -> None:
    os.kill(spares(process)[0], signal.SIGSTOP)


def end(process: subprocess.Popen[str], _: Path) -> None:
    os.kill(spares(process)[0], signal.SIGKILL)


def touch(_: subprocess.Popen[str], folder: Path) -> None:
    os.utime(folder / "train.py")


NO_DATA = "if restarted(): raise ValueError('no data')\n"
ITS_OWN_MPI = "from mpi4py import MPI\nif not MPI.Is_initialized(): MPI.Init()\n"
KILLED = "a spare was killed by signal 9 while it waited in init(). No more spares are started there"
BEFORE = " before it came to init()"


@pytest.mark.parametrize(
    ("at_start", "does", "said", "processes"),
    [
        ("", end, KILLED, 5),
        *nightly(
            ("", stop, "a spare did not answer within 5 s and was killed", None),  # a new process becomes the rank
            ("if restarted(): sys.exit(5)\n", None, f"a spare ended with exit code 5{BEFORE}", 5),
            (NO_DATA, None, f"a spare ended with exit code 1{BEFORE}: ValueError: no data. No more spares", 5),
            (ITS_OWN_MPI, None, "a spare cannot become a rank: the script starts MPI before it calls init()", None),
            ("", touch, "a spare cannot become a rank: FOLDER/train.py has changed", None),
        ),
    ],
)
def test_a_spare_that_cannot_become_a_rank(
    tmp_path: Path,
    at_start: str,
    does: Callable[[subprocess.Popen[str], Path], None] | None,
    said: str,
    processes: int | None,
    undisturbed: Undisturbed,
) -> None:
    """It is named once; the training is right. `processes`: no further spare, one after the other, was started."""

    def during(process: subprocess.Popen[str], has_said: Callable[[str], int]) -> None:
        if does:
            until(lambda: has_said("2 spares are ready"))
            does(process, tmp_path)
        if does is None or does is end:
            until(lambda: has_said(said.partition(":")[0]))
        (tmp_path / "go-7").touch()

    job = train(tmp_path, KILL_7, at_start=at_start, during=during)
    succeeded(job)
    assert result(tmp_path)[0] == undisturbed()[0]
    times = 2 if does is touch else 1  # both spares see that the script has changed
    assert job.stderr.count(f"{HERE}: {said.replace('FOLDER', str(tmp_path))}") == times, job.output
    assert job.stderr.count("a spare ") == times, job.output
    assert len(tries(job)) == 2, job.output
    assert processes in (None, len(list(tmp_path.glob("began-*"))))


@pytest.mark.nightly
def test_an_exit_code(tmp_path: Path) -> None:
    """A rank that was a spare leaves. Its exit code is that of the job."""
    wrong = KILL_7 + "    if rank == 1 and step > 7 and not once('there'): os._exit(7)"
    job = train(tmp_path, wrong, "--max-restarts", "1", during=let_go(tmp_path))
    failed(job)
    assert job.code in (7, 137), job.output  # MPICH may return the code of a rank that it has killed itself
    assert len(tries(job)) == 2, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """The signal comes when spares have become the ranks and other spares wait."""

    def during(process: subprocess.Popen[str], said: Callable[[str], int]) -> None:
        let_go(tmp_path)(process, said)
        until(lambda: said("2 spares are ready") == 2)
        process.send_signal(number)
        if number == signal.SIGKILL:
            drop_kept(tmp_path)

    job = train(tmp_path, STAYS, during=during)
    failed(job)
    assert job.code == (-number if number == signal.SIGKILL else 128 + number), job.output


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["holder", "daemon"])
def test_what_has_started_them_is_killed(tmp_path: Path, victim: str, undisturbed: Undisturbed) -> None:
    """The job starts again. The guard blames mpiexec's daemon, which has started the stubs, not ranks or holder."""

    def during(process: subprocess.Popen[str], said: Callable[[str], int]) -> None:
        let_go(tmp_path)(process, said)
        if victim == "holder":
            child = next(pid for pid in ranks_of(tmp_path) if Path(f"/proc/{pid}").exists())
        else:  # of a stub
            lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in processes(process)}
            child = next(pid for pid, words in lines.items() if words[1:3] == [b"-I", b"-S"])
        os.kill(parent_of(child), signal.SIGKILL)

    job = train(tmp_path, STAYS, during=during)
    succeeded(job)
    assert result(tmp_path)[0] == undisturbed()[0]
    assert len(tries(job)) == 3, job.output
    blamed = rf"failed at step 10: the process of mpiexec on {HERE} that started ranks 0,1 "
    assert victim == "holder" or re.search(blamed, job.stderr), job.output


@pytest.mark.nightly
def test_the_roster_knows_them(tmp_path: Path) -> None:
    """`mpitrain ps` lists spares that have become ranks, and `mpitrain kill` ends them."""
    listed = []

    def during(process: subprocess.Popen[str], said: Callable[[str], int]) -> None:
        let_go(tmp_path)(process, said)
        mpitrain = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain"]
        # Not its exit code: a job of another test may have a server whose list cannot be read.
        done = subprocess.run(
            [*mpitrain, "ps", "--hosts", "localhost"], check=False, stdout=subprocess.PIPE, text=True, timeout=100
        )
        listed.extend(line for line in done.stdout.splitlines() if str(tmp_path) in line)
        subprocess.run([*mpitrain, "kill", "--hosts", "localhost", listed[0].split()[0]], check=True, timeout=100)

    failed(train(tmp_path, STAYS, during=during))
    assert len(listed) == 1, listed
    assert f"0,1 on {HERE}" in listed[0]
