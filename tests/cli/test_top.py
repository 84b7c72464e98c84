"""`mpitrain top`: in a terminal, out of one, and what it says where there is nothing to see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from free_ports import free_port
from jobs import HANG_SECONDS, Job, clean_environment, run_command, until
from mpitrain.cli import main
from mpitrain.launch.live_jobs import LiveJob
from watching_live import job_of, training, trains

TOP = [sys.executable, "-m", "mpitrain", "top"]
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`mpitrain top` in a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24, **variables: str) -> None:
        self.master, slave = pty.openpty()
        self._slave = slave
        self.resize(columns, lines)
        environment = clean_environment({"TERM": "xterm", **variables})
        self.process = subprocess.Popen(
            [*TOP, *arguments],
            env=environment,
            preexec_fn=lambda: os.login_tty(slave),  # noqa: PLW1509 (its own, so that Ctrl-C is a signal)
        )
        self.text = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def shows(self, text: str) -> bool:
        """Read on; True if the text has come since `forget`."""
        while select.select([self.master], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):
                self.text += os.read(self.master, 1 << 16).decode(errors="replace")
                continue
            break
        return text in _ESCAPE.sub("", self.text)

    def forget(self) -> None:
        self.shows("")
        self.text = ""

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("top")


@pytest.fixture(scope="module")
def job(folder: Path) -> Iterator[LiveJob]:
    with training(folder, 2):
        yield job_of(folder, trains)


def top(*arguments: str) -> Job:
    return run_command([*TOP, *arguments], env={"COLUMNS": "80"})


def test_one_look_where_there_is_no_terminal(job: LiveJob, folder: Path) -> None:
    shown = top(job.answer["job"])
    assert shown.code == 0, shown.output
    head, script, progress, *_ = shown.stdout.splitlines()
    assert re.fullmatch(rf"job {job.answer['job']}  trains  0:\d\d:\d\d", head.rstrip())
    assert script.startswith(str(folder / "script.py")[:60])
    expected = r"step [\d,]+ / 1,000,000  0 %  (\d+ d \d+ h|\d+:\d\d:\d\d) left  loss 0\.25  [\d,]+ samples/s  epoch \d+"
    assert re.fullmatch(expected, progress.rstrip())
    rows = [line.split() for line in shown.stdout.splitlines() if re.match(r"[! ] +\d+ ", line)]
    assert sorted((row[0], row[1]) for row in rows) == [(str(rank), socket.gethostname()) for rank in (0, 1)]
    assert f"hosts: {socket.gethostname()} (2)" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_in_a_terminal_until_the_job_ends(job: LiveJob, tmp_path: Path) -> None:
    """A stopped rank comes first, with a mark. When the job has ended, top says how, and ends with 0.

    Of several jobs, one must be chosen.
    """
    other = job
    with training(tmp_path, 2) as process:
        job = job_of(tmp_path, trains)
        shown = top()
        assert shown.code == 1, shown.output
        assert "Choose one: mpitrain top JOB" in shown.stderr
        for one in (job, other):
            assert re.search(rf"^{one.answer['job']}  \w+ ", shown.stdout, re.M)
        with Terminal(job.answer["job"]) as terminal:
            until(lambda: terminal.shows("q end"))
            pid = job.answer["ranks"][1]["pid"]
            os.kill(pid, signal.SIGSTOP)
            try:
                until(lambda: terminal.shows("!    1 ") and terminal.shows(f"kill -CONT {pid}"))
            finally:
                os.kill(pid, signal.SIGCONT)
            terminal.resize(40, 10)
            terminal.forget()
            until(lambda: terminal.shows("RANK PHASE"))  # there is no room for the host
            process.send_signal(signal.SIGINT)
            until(lambda: terminal.shows("the job has ended with exit code 130"))
            assert terminal.process.wait(HANG_SECONDS) == 0


@pytest.mark.parametrize(
    ("keys", "variables"), [("q", {"NO_COLOR": "1"}), pytest.param("\x03", {}, marks=pytest.mark.nightly)]
)
def test_the_user_ends_it(job: LiveJob, keys: str, variables: dict[str, str]) -> None:
    """The terminal is left as it was. The job continues. No colour is shown to who wants none."""
    with Terminal(job.answer["job"], **variables) as terminal:
        before = termios.tcgetattr(terminal.master)
        until(lambda: terminal.shows("q end"))
        assert termios.tcgetattr(terminal.master) != before
        until(lambda: terminal.shows("computes"))
        if variables:
            colours = re.findall(r"\x1b\[[0-9;]*m", terminal.text)
            assert not [code for code in colours if re.search(r"\b(3[0-7]|9[0-7]|38|48)\b", code)]
        terminal.press("r")
        terminal.press(keys)
        assert terminal.process.wait(HANG_SECONDS) == 0
        assert termios.tcgetattr(terminal.master) == before
    assert trains(dict(job_of(Path(job.answer["script"]).parent).answer))


def test_a_job_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "nothing"]) == 1
    err = capsys.readouterr().err
    assert f"no job nothing of yours has its launcher on {socket.gethostname()}" in err
    assert "a job that plain mpiexec has started has no launcher" in err
    assert f"there is no job nothing of yours on {socket.gethostname()}" in err


@pytest.mark.nightly
def test_a_job_of_a_server(tmp_path: Path) -> None:
    """It has no launcher, and is shown all the same."""
    script = tmp_path / "serve.py"
    script.write_text(SERVED)
    command = [sys.executable, "-m", "mpitrain", "serve", "--port", str(free_port()), str(script)]
    environment = clean_environment({"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)})
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            job = job_of(tmp_path, lambda one: one["served"], name="serve.py")
            shown = top(job.answer["job"])
        finally:
            process.kill()
    assert shown.code == 0, shown.output
    assert job.path is None
    assert "0 workers, 0 gone" in shown.stdout
    deadline = time.monotonic() + HANG_SECONDS
    line = job.watch(0.2)
    while not line.is_closed and time.monotonic() < deadline:
        line.receive(1.0)
    assert line.is_closed  # its server has ended


SERVED = """
import numpy
import mpitrain as mt

def loss(parameters, batch, on_gradient):
    on_gradient("w", parameters["w"])
    return 0.5

def build(world):
    data = mt.data.ArrayData(world, (numpy.zeros((4, 1)),), global_batch=4)
    return mt.Parts(mt.ArrayFunction(loss, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.ParameterServer(), data)

mt.Trainer(build, [mt.StopAtStep(9)]).run()
"""
