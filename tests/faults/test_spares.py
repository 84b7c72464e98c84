"""`mpitrain run --restarts N --spares`: processes that wait in init() become the ranks of the next try."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import restarting
from faults.outcome import failed, succeeded
from faults.restarting import parameters, tries
from faults.sparing import KILL, let_go, ranks, spares, stubs, token_of, train
from jobs import VENVS, until
from keeping import drop_kept

HERE = socket.gethostname()
# These fixtures run the same training without spares.
uninterrupted, uninterrupted_three = restarting.uninterrupted, restarting.uninterrupted_three


def printed(stdout: str, line: str) -> Counter[int]:
    """How often each rank printed this line. mpitrain prints equal lines once, with the ranks in front."""
    found: Counter[int] = Counter()
    for named in re.findall(rf"^\[([\d,-]+)\] {line}$", stdout, re.M):
        for first, _, last in (part.partition("-") for part in named.split(",")):
            found.update(range(int(first), int(last or first) + 1))
    return found


def test_killed_ranks(tmp_path: Path, vendor: str, uninterrupted_three: bytes) -> None:
    """Spares become the ranks. The second kill hits such a spare."""
    wrong = KILL.format(step=7) + "    " + KILL.format(step=13)
    begun: list[set[int]] = []

    def during(process: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        for number, step in ((1, 7), (2, 13)):
            until(lambda number=number: (tmp_path / "stderr").read_text().count("3 spares are ready") == number)
            begun.append(set(spares(token_of(process))))
            (tmp_path / f"go-{step}").touch()

    job = train(tmp_path, wrong, ranks=3, vendor=vendor, during=during)
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted_three
    assert len(ranks(tmp_path)) == 9
    assert len(begun[0]) == len(begun[1]) == 3
    assert begun[0] | begun[1] < ranks(tmp_path)
    assert printed(job.stdout, "begins") == {0: 3, 1: 3, 2: 3}, job.output
    first, second, last = tries(job)
    # mpiexec may name a rank that it has ended itself.
    how = r"(was killed by signal 9|ended without a word \(os\._exit, or killed\?\))"
    assert re.fullmatch(rf"try 1 of 3 failed at step 7: rank 1 on {HERE} {how}; starting again on {HERE}", first)
    assert re.fullmatch(
        rf"try 2 of 3, from step 6, failed at step 13: rank 1 on {HERE} {how}; starting again on {HERE}", second
    )
    assert last == "try 3 of 3 succeeded"


def test_no_spare_is_ready(tmp_path: Path, uninterrupted: bytes) -> None:
    job = train(tmp_path, "if rank == 1 and step == 7 and once('killed'): kill()")
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted
    assert len(tries(job)) == 2, job.output


def test_a_spare_is_killed(tmp_path: Path, uninterrupted: bytes) -> None:
    def during(process: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        until(lambda: has_said("2 spares are ready"))
        os.kill(spares(token_of(process))[0], signal.SIGKILL)
        until(lambda: has_said("a spare was killed by signal 9"))
        (tmp_path / "go-7").touch()

    job = train(tmp_path, KILL.format(step=7), during=during)
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted
    said = (
        f"mpitrain: {HERE}: a spare was killed by signal 9 while it waited in init(). No more spares are started there"
    )
    assert job.stderr.count(said) == 1, job.output
    assert "a spare" not in job.stderr.replace(said, "")
    assert len(list(tmp_path.glob("began-*"))) == 2 + 2 + 1


def test_a_spare_does_not_answer(tmp_path: Path, uninterrupted: bytes) -> None:
    """The spare is killed while it becomes a rank. A new process then becomes the rank."""

    def during(process: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        until(lambda: has_said("2 spares are ready"))
        for pid in spares(token_of(process))[:1]:
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go-7").touch()

    job = train(tmp_path, KILL.format(step=7), during=during)
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted
    assert job.stderr.count("a spare did not answer within 5 s and was killed") == 1, job.output
    assert len(tries(job)) == 2, job.output


@pytest.mark.parametrize(
    ("at_start", "how"),
    [
        pytest.param("if restarted(): sys.exit(5)\n", "ended with exit code 5", marks=pytest.mark.nightly),
        ("if restarted(): raise ValueError('no data')\n", "ended with exit code 1"),
    ],
)
def test_a_script_that_ends_before_init(tmp_path: Path, at_start: str, how: str, uninterrupted: bytes) -> None:
    def during(_: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        until(lambda: has_said(f"a spare {how} before it came to init()"))
        (tmp_path / "go-7").touch()

    job = train(tmp_path, KILL.format(step=7), at_start=at_start, during=during)
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted
    assert len(list(tmp_path.glob("began-*"))) == 2 + 1 + 2, "one spare, not one after the other"
    assert ("ValueError: no data. No more spares" in job.stderr) == ("ValueError" in at_start), job.output


def test_a_script_that_starts_mpi_itself(tmp_path: Path, uninterrupted: bytes) -> None:
    def during(_: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        until(lambda: has_said("a spare cannot become a rank: the script starts MPI before it calls init()"))
        (tmp_path / "go-7").touch()

    at_start = "from mpi4py import MPI\nif not MPI.Is_initialized(): MPI.Init()\n"
    job = train(tmp_path, KILL.format(step=7), at_start=at_start, during=during)
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted
    assert job.stderr.count("a spare") == 1, job.output


def test_the_script_has_changed(tmp_path: Path, uninterrupted: bytes) -> None:
    def during(_: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        until(lambda: has_said("2 spares are ready"))
        os.utime(tmp_path / "train.py")
        (tmp_path / "go-7").touch()

    job = train(tmp_path, KILL.format(step=7), during=during)
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted
    assert f"a spare cannot become a rank: {tmp_path}/train.py has changed" in job.stderr, job.output


def test_an_exit_code(tmp_path: Path) -> None:
    """A rank that was a spare leaves. Its exit code is that of the job."""
    wrong = KILL.format(step=7) + "    if rank == 1 and step > 7: os._exit(7)"
    job = train(tmp_path, wrong, "--restarts", "1", during=let_go(tmp_path, 7))
    failed(job)
    assert job.code in (7, 137), job.output  # MPICH may return the code of a rank that it has killed itself
    assert len(tries(job)) == 2, job.output


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM, signal.SIGKILL]
)
def test_a_signal_to_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """The signal comes when spares have become the ranks and other spares wait."""

    def during(process: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        let_go(tmp_path, 7)(process, has_said)
        until(lambda: (tmp_path / "stderr").read_text().count("2 spares are ready") == 2)
        until((tmp_path / "there").exists)
        process.send_signal(number)
        if number == signal.SIGKILL:
            drop_kept(tmp_path)

    wrong = KILL.format(step=7) + "    if step == 10:\n        once('there')\n        time.sleep(100)"
    job = train(tmp_path, wrong, during=during)
    failed(job)
    assert job.code == (-number if number == signal.SIGKILL else 128 + number), job.output


def test_what_keeps_the_spares_is_killed(tmp_path: Path, uninterrupted: bytes) -> None:
    """The spares that have become ranks end with the holder. The job starts again without spares."""

    def during(process: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        let_go(tmp_path, 7)(process, has_said)
        until((tmp_path / "there").exists)
        pid = next(pid for pid in ranks(tmp_path) if Path(f"/proc/{pid}").exists())
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)

    wrong = KILL.format(step=7) + "    if step == 10 and not (folder / 'there').exists():\n"
    wrong += "        once('there')\n        time.sleep(100)"
    job = train(tmp_path, wrong, during=during)
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted
    assert len(tries(job)) == 3, job.output


def test_the_daemon_of_mpiexec_is_killed(tmp_path: Path, uninterrupted: bytes) -> None:
    """The daemon has started the stubs. The guard blames the daemon, not the ranks or the holder of the spares."""

    def during(process: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        let_go(tmp_path, 7)(process, has_said)
        until((tmp_path / "there").exists)
        stub = stubs(token_of(process))[0]
        parent = int(Path(f"/proc/{stub}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)

    wrong = KILL.format(step=7) + "    if step == 10 and once('there'): time.sleep(100)"
    job = train(tmp_path, wrong, during=during)
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted
    assert re.search(rf"failed at step 10: the process of mpiexec on {HERE} that started ranks 0,1 ", job.stderr)


def test_the_roster_knows_them(tmp_path: Path) -> None:
    """`mpitrain ps` lists spares that have become ranks, and `mpitrain kill` ends them."""
    listed = []

    def during(process: subprocess.Popen[str], has_said: Callable[[str], bool]) -> None:
        let_go(tmp_path, 7)(process, has_said)
        until((tmp_path / "there").exists)
        mpitrain = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain"]
        # Not its exit code: a job of another test may have a server whose list cannot be read.
        done = subprocess.run(
            [*mpitrain, "ps", "--hosts", "localhost"], check=False, stdout=subprocess.PIPE, text=True, timeout=100
        )
        listed.extend(line for line in done.stdout.splitlines() if str(tmp_path) in line)
        subprocess.run([*mpitrain, "kill", "--hosts", "localhost", listed[0].split()[0]], check=True, timeout=100)

    wrong = KILL.format(step=7) + "    if step == 10:\n        once('there')\n        time.sleep(100)"
    job = train(tmp_path, wrong, during=during)
    failed(job)
    assert len(listed) == 1, listed
    assert f"0,1 on {HERE}" in listed[0]


def test_wrong_options(tmp_path: Path) -> None:
    job = train(tmp_path, "pass", "--restarts", "0")
    failed(job, "--spares keeps processes ready for a restart; it needs --restarts N")
    assert job.code == 2
