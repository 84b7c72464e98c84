"""The launcher's live socket: what it says, to whom, that no watcher harms the job, and the folder where it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS, run_command, until
from mpitrain.errors import LaunchError
from mpitrain.launch import control, live_jobs
from mpitrain.launch.live import Live
from mpitrain.launch.live_jobs import LiveJob, LiveLine, find
from mpitrain.launch.record_end import DOCUMENT, OUTPUT
from watching_live import answer_of, answers_until, job_of, training, trains

RANKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def job(folder: Path) -> Iterator[LiveJob]:
    """A job that trains on three ranks."""
    with training(folder, RANKS):
        yield job_of(folder, trains)


@contextlib.contextmanager
def connected(job: LiveJob) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(HANG_SECONDS)
        line.connect(str(job.path))
        yield line


def test_what_a_look_says(job: LiveJob, folder: Path) -> None:
    def is_whole(one: dict[str, Any]) -> bool:
        return (
            "samples/s" in one["metrics"] and one["record"] and all(of["samples_per_second"] > 0 for of in one["ranks"])
        )

    answer = answer_of(job, is_whole)
    assert (answer["version"], answer["tries"], answer["ids"]) == (1, 1, [answer["job"]])
    assert answer["arguments"] == ["0.02", str(folder / "record")]
    assert answer["since"] < answer["at"] <= time.time()
    host = socket.gethostname()
    assert answer["hosts"].keys() == {host}
    assert answer["hosts"][host]["ranks"] == [0, 1, 2]
    assert 0 <= answer["hosts"][host]["silence"] < HANG_SECONDS
    assert answer["metrics"]["loss"] == 0.25
    assert (answer["record"], answer["served"]) == (str(folder / "record"), None)
    assert all(event.keys() == {"at", "text"} for event in answer["events"])  # on a busy machine, of slow starts
    for rank, entry in enumerate(answer["ranks"]):
        assert (entry["rank"], entry["host"]) == (rank, host)
        assert f"PMI_RANK={rank}".encode() in Path(f"/proc/{entry['pid']}/environ").read_bytes().split(b"\0")
        # 24 samples are 3 steps of 8. The step that has begun is at most one ahead of that which was made.
        assert entry["epoch"] in {(entry["step"] - 1 + 2) // 3, (entry["step"] + 2) // 3}
        assert entry["phase"] in ("computes", "waits", "wire", "busy")


def test_a_watch_goes_on_and_sees_steps(job: LiveJob) -> None:
    with contextlib.closing(job.watch(0.2)) as line:
        first = answers_until(line, trains)[-1]
        seen = answers_until(line, lambda one: one["ranks"][0]["step"] > first["ranks"][0]["step"])
    times = [answer["at"] for answer in (first, *seen)]
    assert times == sorted(set(times))


def test_a_stopped_rank_is_named(job: LiveJob) -> None:
    pid = job.answer["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = answer_of(job, lambda one: one["ranks"][1]["phase"] == "stopped" and one["stall"])
        assert f"rank 1 on {socket.gethostname()} is stopped" in answer["stall"]
        assert f"kill -CONT {pid}" in answer["stall"]
    finally:
        os.kill(pid, signal.SIGCONT)
    answer_of(job, lambda one: trains(one) and one["ranks"][1]["phase"] != "stopped" and not one["stall"])


def test_one_who_says_no_more_gets_one_answer(job: LiveJob) -> None:
    """As `echo ... | socat - UNIX-CONNECT:...` does."""
    for request in ('{"look": 1, "version": 1}', '{"watch": 1, "version": 1}'):
        with connected(job) as line:
            line.sendall(request.encode() + b"\n")
            line.shutdown(socket.SHUT_WR)
            (answer,) = line.makefile().read().splitlines()
        assert json.loads(answer)["job"] == job.answer["job"]


REFUSED = [
    (b"hello\n", "this is no request"),
    (b"[1]\n", "this is no request"),
    (b'{"version": 1}\n', "this is no request"),
    (b'{"look": 1}\n', "this is no request"),
    (b'{"look": 1, "version": 2}\n', "the version of the request is 2, and this launcher speaks 1"),
    (b'{"look": 1, "version": true}\n', "the version of the request is True"),
    (b'{"watch": 0.1, "version": 1}\n', "the seconds of a watch are 0.1; allowed are 0.2 to 3600"),
    (b'{"watch": "1", "version": 1}\n', "the seconds of a watch are '1'"),
    (b'{"watch": NaN, "version": 1}\n', "the seconds of a watch are nan"),
    (b'{"watch": 1e999, "version": 1}\n', "the seconds of a watch are inf"),
    (b"\xff\xfe\n", "this is no request"),
    (b'{"output": 1, "version": 1}\n', "the output of ranks is asked for by"),
    (b'{"output": {"rank": "1"}, "version": 1}\n', "the output of ranks is asked for by"),
    (b'{"output": {"ranks": 1}, "version": 1}\n', "the output of ranks is asked for by"),
    (b'{"output": {"ranks": "1-"}, "version": 1}\n', "'1-' names no ranks; allowed are numbers below 100,000"),
    (b'{"output": {"ranks": "0-999999"}, "version": 1}\n', "'0-999999' names no ranks"),
    (b"[" * 4000 + b"\n", "this is no request"),
    (b"x" * ((1 << 17) + 1), "a request has at most 131072 bytes"),
]


def test_wrong_requests_are_refused(job: LiveJob) -> None:
    for request, text in REFUSED:
        with connected(job) as line:
            line.sendall(request)
            answer = json.loads(line.makefile().read())  # up to the end of the connection
        assert answer.keys() == {"error"}, request
        assert text in answer["error"], request


def test_no_watcher_harms_the_job(job: LiveJob) -> None:
    """A hundred who watch, some of whom read nothing, send half a line, hang up or send a megabyte of garbage."""
    step = job.answer["ranks"][0]["step"]
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connected(job)) for _ in range(100)]
        for number, line in enumerate(lines):
            if number % 4 == 0:
                line.sendall(b'{"watch": 0.2, "version": 1}\n')  # and reads nothing
            elif number % 4 == 1:
                line.sendall(b'{"watch": 0.2, "ver')
            elif number % 4 == 2:
                line.sendall(b'{"watch": 0.2, "version": 1}\n')
                line.close()
            else:
                with contextlib.suppress(OSError):  # it is refused before all of it has gone
                    line.settimeout(1.0)
                    line.sendall(os.urandom(1 << 20))
        later = answer_of(job, lambda one: one["ranks"][0]["step"] > step + 20)
    assert later["state"] == "trains"


def test_there_is_a_most_of_watchers(job: LiveJob, folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connected(job)) for _ in range(257)]
        for line in lines:
            with contextlib.suppress(BrokenPipeError):
                line.sendall(b'{"watch": 60, "version": 1}\n')
        answers = [json.loads(line.makefile().readline()) for line in lines]
    refused = [answer["error"] for answer in answers if "error" in answer]
    assert set(refused) == {"256 others watch this job, which is the limit"}
    assert len(refused) < 10  # the one too many, and for those that have just gone
    job_of(folder, trains)  # when they have gone, there is room again


ASKS = """
import socket, sys
line = socket.socket(socket.AF_UNIX)
line.settimeout(60)
line.connect(sys.argv[1])
line.sendall(b'{"look": 1, "version": 1}\\n')
print('got', line.makefile().read())
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to become another user")
def test_another_user_gets_nothing(job: LiveJob) -> None:
    as_other = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/bin/python3", "-c", ASKS]
    refused = run_command([*as_other, str(job.path)])
    assert "PermissionError" in refused.stderr, refused.output
    assert refused.code == 1
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (job.path.parent, job.path)]
    assert modes == [0o700, 0o600]
    try:  # if the modes did not keep others out, the launcher itself would
        job.path.parent.chmod(0o711)
        job.path.chmod(0o666)
        let_in = run_command([*as_other, str(job.path)])
    finally:
        job.path.parent.chmod(0o700)
        job.path.chmod(0o600)
    assert let_in.stdout.strip() in ("", "got"), let_in.output  # it hangs up, perhaps before the request has gone


def test_a_restart_and_the_end(tmp_path: Path) -> None:
    """The second try has another id; the last answer says how the job has ended."""
    with training(tmp_path, 2, "--max-restarts", "1") as process:
        job = job_of(tmp_path, trains)
        with contextlib.closing(job.watch(0.2)) as line:
            answers_until(line, trains)
            os.kill(job.answer["ranks"][1]["pid"], signal.SIGKILL)
            answers = answers_until(line, lambda one: one["tries"] == 2 and trains(one))
            assert "restarts" in {answer["state"] for answer in answers}
            second = answers[-1]
            assert second["ids"] == [job.answer["job"], second["job"]]
            assert job_of(tmp_path).has_id(job.answer["job"])
            texts = [event["text"] for event in second["events"]]
            assert any("attempt 1 of 2" in text and "starting again" in text for text in texts), texts
            process.send_signal(signal.SIGINT)
            last = answers_until(line, lambda one: "ended" in one)[-1]
            process.wait(HANG_SECONDS)  # it has one Ctrl-C, and ends by itself
    assert last["state"] == "ends"
    assert last["ended"] == {"code": 130, "text": "the job has ended with exit code 130"}
    assert process.returncode == 130
    assert not job.path.exists()


def test_a_launcher_that_is_stopped_and_then_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named. Then its watchers hear no more, and the agent here removes its socket."""
    monkeypatch.setattr(live_jobs, "_ANSWER_SECONDS", 1.0)
    with training(tmp_path, 1) as process:
        job = job_of(tmp_path, trains)
        assert job.path is not None
        line = job.watch(0.2)
        process.send_signal(signal.SIGSTOP)
        jobs, wrong = find()
        assert job.answer["job"] not in [other.answer["job"] for other in jobs]
        assert f"{job.path.name}: no answer within 1 s; is this launcher stopped?" in wrong
        process.kill()
        until(lambda: line.receive(1.0) is None and line.is_closed)
        line.close()
        process.wait()
        until(lambda: not job.path.exists())
        with pytest.raises(LaunchError, match="does not answer"):
            LiveLine(job.path, {"look": 1})


@pytest.fixture
def top(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of /tmp. Not tmp_path, which may be too long for a path of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(control, "OF_SOCKETS", folder)
        yield Path(folder)


def test_the_socket_of_a_dead_launcher_is_removed(top: Path) -> None:
    """One of this machine. Of another one, with which this one shares a folder, it is not known."""
    folder = live_jobs.live_folder(make=True)
    assert folder is not None
    here, elsewhere = folder / f"{socket.gethostname()}~{os.getpid()}~1.live", folder / "elsewhere~1~1.live"
    for path in (here, elsewhere):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    with socket.socket(socket.AF_UNIX) as contained:  # as of a launcher in a container, whose number is not seen here
        contained.bind(str(listening := folder / f"{socket.gethostname()}~1~1.live"))
        contained.listen()
        jobs, wrong = find()
        assert (
            [job for job in jobs if job.path is not None] == wrong == []
        )  # those without one are other tests' servers
        assert set(folder.iterdir()) == {elsewhere, listening}


def test_nothing_stays(top: Path) -> None:
    """The last job removes the folder. A job that begins meanwhile makes it anew."""
    folder = top / f"mpitrain-live-{os.geteuid()}"
    with Live("script.py", [], 0.0):
        other = folder / "other.live"
        other.touch()
        assert len(list(folder.iterdir())) == 2
    assert list(folder.iterdir()) == [other]
    other.unlink()
    with Live("script.py", [], 0.0):
        assert len(list(folder.iterdir())) == 1
    assert not folder.exists()


@pytest.mark.parametrize("fault", ["mode", "link", "file"])
def test_a_folder_that_others_may_enter(fault: str, top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused on both sides. The launcher says so, and the job continues without it."""
    path = top / f"mpitrain-live-{os.geteuid()}"
    if fault == "mode":
        path.mkdir(mode=0o755)
    elif fault == "link":
        (top / "other").mkdir(mode=0o700)
        path.symlink_to(top / "other")
    else:
        path.touch(0o600)
    with Live("script.py", [], 0.0) as live:
        assert live.end(3) == 3
    said = capsys.readouterr().err
    assert f"this job cannot be watched (mpitrain top): {socket.gethostname()}: {path} " in said
    assert list(top.glob("*/*")) == []
    with pytest.raises(LaunchError, match=r"must be a folder of user|cannot be made"):
        find()


@pytest.mark.usefixtures("top")
def test_before_and_between_tries() -> None:
    """There are no ranks yet. Of an error the last answer has the text."""
    with pytest.raises(RuntimeError), Live("script.py", ["-x"], 12.0):
        (job,) = [job for job in find()[0] if job.path is not None]
        line = job.watch(0.2)
        answers_until(line, lambda one: one["state"] == "starts")
        raise RuntimeError("no ssh")
    assert (job.answer["state"], job.answer["ids"], job.answer["ranks"]) == ("starts", [], [])
    assert (job.answer["script"], job.answer["arguments"], job.answer["since"]) == ("script.py", ["-x"], 12.0)
    last = answers_until(line, lambda one: "ended" in one)[-1]
    line.close()
    assert last["ended"] == {"code": None, "text": "the job has ended: no ssh"}


@pytest.mark.usefixtures("top")
@pytest.mark.parametrize(
    ("code", "is_failure", "text"),
    [
        (0, False, "the job has ended, and has done its work"),
        (5, True, "the job has ended with exit code 5"),
        (138, False, "the job has ended with exit code 138: it is saved, and the same command continues from there"),
    ],
)
def test_the_record_notes_a_failure_and_no_saved_training(
    code: int, is_failure: bool, text: str, tmp_path: Path
) -> None:
    (tmp_path / DOCUMENT).write_text('{"job": "id", "end": ""}')
    with Live("script.py", [], 0.0) as live:
        live._ids, live._record = ["id"], str(tmp_path)
        assert live.end(code) == code
        assert live.answer()["ended"] == {"code": code, "text": text}
    assert bool(json.loads((tmp_path / DOCUMENT).read_text())["end"]) is is_failure
    assert (tmp_path / OUTPUT).exists() is is_failure
