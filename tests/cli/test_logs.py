"""`mpitrain logs`, the files that it reads (launch/job_logs.py), and `mpitrain run --detach`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs import HANG_SECONDS, clean_environment, run_command, until
from mpitrain.cli import main
from mpitrain.launch import job_logs
from mpitrain.launch.job_logs import JobLogs, find_logs, logs_folder, read_about
from mpitrain.launch.output import OutputPiece
from mpitrain.launch.placement import Place
from mpitrain.launch.processes import launcher_name

PLACES = (Place("a", 0, 2), Place("b", 2, 1))
DONE = {"code": 0, "text": "the job has ended, and has done its work"}
RUN = [sys.executable, "-m", "mpitrain", "run"]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the launcher says of its logs, which are in a folder of this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return []


def begun(said: list[str], job: str = "1a2b3c4d", folder: Path | None = None, launcher: str = "") -> JobLogs:
    logs = JobLogs()
    logs.open(folder, ["train.py"], launcher or launcher_name(os.getpid()), said.append)
    logs.begin(job, PLACES)
    return logs


def line(logs: JobLogs, rank: int, text: str, end: bytes = b"\n") -> None:
    """A rank prints something, which the terminal shows."""
    logs.take(rank, "stdout", OutputPiece(text.encode(), end))
    if end != b"\r":
        logs.show(f"[{rank}] {text}".encode() + end)


def printed(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(["logs", *words])
    except SystemExit as end:
        code = int(str(end.code))
    return code, *capfd.readouterr()


def test_the_output_of_all_ranks_and_of_one(said: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Each attempt has its id; any of them names the job."""
    logs = begun(said)
    line(logs, 0, "one")
    line(logs, 2, "50 %", b"\r")
    line(logs, 2, "two")
    logs.begin("5e6f7a8b", PLACES)
    line(logs, 2, "again")
    logs.close(DONE)
    for words in ([], ["1a2b3c4d"], ["5e6f7a8b"]):
        assert printed(capfd, *words) == (0, "[0] one\n[2] two\n[2] again\n", "")
    _, out, _ = printed(capfd, "1a2b3c4d", "--rank", "2")
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n"
    of_rank = (
        rf"--- rank 2 on b, attempt 1 \(job 1a2b3c4d\), {when}two\n--- rank 2 on b, attempt 2 \(job 5e6f7a8b\), {when}"
    )
    assert re.fullmatch(rf"{of_rank}again\n", out)
    code, _, err = printed(capfd, "1a2b3c4d", "--rank", "1")
    assert (code, "nothing was printed yet" in err) == (0, True)
    assert said == []


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["00000000"], 1, "there are no logs of a job 00000000 of yours in "),
        (["1a2b3c4d", "--rank", "3"], 2, "there is no rank 3 in job 1a2b3c4d; its ranks are 0-2"),
        (["1a2b3c4d", "--rank", "x"], 2, "'x' is not the number of a rank"),
        (["train.py"], 2, "'train.py' is not the id of a job"),
        (["1a2b3c4d", "--log-dir", "/nowhere"], 1, "there are no logs of a job 1a2b3c4d of yours in /nowhere"),
    ],
)
def test_what_is_not_there(
    said: list[str], capfd: pytest.CaptureFixture[str], words: list[str], code: int, why: str
) -> None:
    begun(said).close(DONE)
    found, out, err = printed(capfd, *words)
    assert (found, out, why in err, err.startswith("mpitrain logs: ")) == (code, "", True, True), err


def test_files_are_bounded_and_old_jobs_go(
    said: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_logs, "_MOST_FILE_BYTES", 3000)
    monkeypatch.setattr(job_logs, "_LEAST_FILE_BYTES", 100)
    monkeypatch.setattr(job_logs, "_MOST_JOBS", 3)
    for number in range(5):
        begun(said, f"0000000{number}").close(DONE)
    mine = begun(said, "0000000a")  # it still runs, so it stays
    until(lambda: find_logs("0000000a", logs_folder()) is not None)
    last = begun(said, "0000000b")
    for number in range(200):
        line(last, 0, f"line {number:04}" + 20 * ".")
        time.sleep(0.002)
    last.close(DONE)
    assert {path.name for path in logs_folder().iterdir()} == {"00000003", "00000004", "0000000a", "0000000b"}
    sizes = {path.name: path.stat().st_size for path in (logs_folder() / "0000000b").iterdir()}
    assert sizes["output.log"] <= 3000 and sizes["rank-0.log"] <= 1000 and sizes["rank-0.log.1"] <= 1000, sizes
    _, out, _ = printed(capfd, "0000000b")
    assert re.findall(r"line (\d+)", out)[-1] == "0199"
    assert 2000 < len(out) <= 6000
    mine.close(DONE)


def test_a_folder_of_its_own_has_all(said: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`mpitrain logs` finds it without being told where."""
    logs = begun(said, folder=tmp_path / "mine")
    logs.show(10 * job_logs._MOST_FILE_BYTES * b"." + b"\n")
    line(logs, 1, "x")
    logs.close(DONE)
    (there,) = (tmp_path / "mine").iterdir()
    assert sorted(path.name for path in there.iterdir()) == ["job.json", "output.log", "rank-1.log"]
    _, out, _ = printed(capfd, "1a2b3c4d")
    assert out.endswith("[1] x\n")


def test_a_full_disk(said: list[str], tmp_path: Path) -> None:
    """The job continues, and one line says so; what could be written is there."""
    there = tmp_path / "mine/1a2b3c4d"
    there.mkdir(parents=True)
    (there / "output.log").symlink_to("/dev/full")
    logs = begun(said, folder=tmp_path / "mine")
    for number in range(3):
        line(logs, 0, f"line {number}")
    until(lambda: said != [])
    time.sleep(1.0)  # all of these lines have been tried
    (there / "output.log").unlink()
    line(logs, 0, "room again")
    logs.close(DONE)
    assert said == [f"the logs in {there} are not complete: No space left on device. The job continues without them"]
    gap, text = (there / "output.log").read_text().splitlines()
    assert re.fullmatch(r"--- \d+ bytes of output are missing here", gap)
    assert text == "[0] room again"
    assert read_about(there)["ended"]["code"] == 0


def test_a_user_without_a_home(said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job runs, with logs only where it is told to keep them."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-at-all").expanduser())  # raises, as without a home
    begun(said).close(DONE)
    assert len(said) == 1 and said[0].startswith("this job has no logs: results are kept in ~/.local/state/mpitrain")
    begun(said, folder=tmp_path / "mine").close(DONE)
    assert find_logs("1a2b3c4d", tmp_path / "mine") is not None and len(said) == 1


def follow(then: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    thread = threading.Thread(target=then)
    thread.start()
    found = printed(capfd, "1a2b3c4d", "-f")
    thread.join()
    return found


def test_following_ends_with_the_job(said: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    logs = begun(said)
    line(logs, 0, "one")
    until(lambda: find_logs("1a2b3c4d", logs_folder()) is not None)

    def train() -> None:
        time.sleep(0.5)
        line(logs, 0, "two")
        logs.close({"code": 3, "text": "the job has ended with exit code 3"})

    code, out, err = follow(train, capfd)
    assert (code, out) == (0, "[0] one\n[0] two\n")
    assert err == "mpitrain logs: job 1a2b3c4d: the job has ended with exit code 3\n"


def test_following_a_job_whose_launcher_is_lost(said: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "1000"]) as launcher:
        logs = begun(said, launcher=launcher_name(launcher.pid))
        line(logs, 0, "one")
        until(lambda: find_logs("1a2b3c4d", logs_folder()) is not None)

        def lose() -> None:
            time.sleep(0.5)
            launcher.kill()
            launcher.wait()

        code, out, err = follow(lose, capfd)
    assert (code, out) == (0, "[0] one\n")
    assert err.startswith("mpitrain logs: job 1a2b3c4d has lost its launcher. `mpitrain ps` shows whether its state is")
    logs.close(DONE)


def test_ctrl_c_ends_the_following_only(said: list[str]) -> None:
    logs = begun(said)
    until(lambda: find_logs("1a2b3c4d", logs_folder()) is not None)
    state = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    command = [sys.executable, "-m", "mpitrain", "logs", "-f", "1a2b3c4d"]
    line(logs, 0, "one")

    def interrupt(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] one\n"
        process.send_signal(signal.SIGINT)

    job = run_command(command, env=state, during=interrupt)
    assert (job.code, job.stderr) == (130, "mpitrain logs: interrupted; job 1a2b3c4d is as before\n")
    logs.close(DONE)


TRAIN = """
import pathlib, sys, time
import mpitrain as mt
world = mt.init()
print("stdin has", repr(sys.stdin.read()))
pathlib.Path(sys.argv[1], f"ready.{world.rank}").touch()
while not pathlib.Path(sys.argv[1], "end").exists():
    time.sleep(0.05)
world.print("the end")
"""


@pytest.fixture
def end(tmp_path: Path) -> Iterator[Path]:
    """The file that ends the detached job. It is there at the end of the test in any case."""
    path = tmp_path / "end"
    yield path
    path.touch()


def test_a_job_that_is_detached_outlives_its_terminal(
    tmp_path: Path, end: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It gets no hangup, and its logs have what it prints."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = [*RUN, "--detach", "-n", "2", "--log-dir", "logs", "train.py", str(tmp_path)]
    environment = clean_environment({"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]})
    # A session of its own, which ends with its leader; and a pipe that is closed, as by the end of ssh.
    done = subprocess.run(
        ["setsid", "-w", *command], cwd=tmp_path, env=environment, capture_output=True, text=True,
        input="data", timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    # What ranks print before all of them have started comes first.
    said = re.search(r"^job (\w{8}) continues without this terminal: process (\d+) on (\S+)\n", done.stdout, re.M)
    assert done.returncode == 0 and said is not None, (done.stdout, done.stderr)
    job, pid, host = said.groups()
    assert host == socket.gethostname()
    for words in (f"mpitrain logs -f {job} ", f"mpitrain top {job} ", f"mpitrain kill {job} "):
        assert words in done.stdout
    until(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
    os.kill(int(pid), signal.SIGHUP)
    time.sleep(1)
    end.touch()
    code, out, err = printed(capfd, job, "-f")
    assert (code, err) == (0, f"mpitrain logs: job {job}: the job has ended, and has done its work\n")
    assert "[0,1] stdin has ''\n" in out and out.endswith("[0] the end\n")
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert json.loads((tmp_path / "logs" / job / "job.json").read_text())["ended"]["code"] == 0


def test_a_detached_job_that_cannot_start_says_so_in_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "mpi.env").write_text("FI_TCP_IFACE=eth77\n")
    job = run_command([*RUN, "--detach", "-n", "2", "--env-file", "mpi.env", "train.py"], cwd=tmp_path)
    assert (job.code, job.stdout, job.left) == (1, "", []), job.output
    assert "FI_TCP_IFACE names eth77, which does not exist here" in job.stderr
    job = run_command([*RUN, "--detach", "-n", "2", "--log-dir", "train.py/logs", "train.py"], cwd=tmp_path)
    assert job.code == 2
    assert "--log-dir train.py/logs cannot be written: Not a directory; name a folder of yours" in job.stderr
