"""The folder of the live sockets: what is left in it, who may enter it, and a launcher that has no ranks yet."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch import live_jobs
from mpitrain.launch.live import Live
from mpitrain.launch.live_jobs import find
from watching_live import answers_until


@pytest.fixture
def top(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of /tmp. Not tmp_path, which may be too long for a path of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(live_jobs, "OF_SOCKETS", folder)
        yield Path(folder)


def test_the_socket_of_a_dead_launcher_is_removed(top: Path) -> None:
    """One of this machine. Of another one, with which this one shares a folder, it is not known."""
    folder = live_jobs.live_folder(make=True)
    assert folder is not None
    here, elsewhere = folder / f"{socket.gethostname()}~{os.getpid()}~1.live", folder / "elsewhere~1~1.live"
    for path in (here, elsewhere):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    jobs, wrong = find()
    assert [job for job in jobs if job.path is not None] == wrong == []  # jobs without a path are other tests' servers
    assert list(folder.iterdir()) == [elsewhere]


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
    """It is refused on both sides. The launcher says so, and the job goes on without it."""
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
