"""`mpitrain serve`, `mpitrain work` and `mpitrain run --servers`: real processes on the loopback, with real faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import TRAIN, Commands
from counting import COUNTING_SCRIPT, check_counts

from jobs import REPOSITORY, Job, run_command, run_job
from mpitrain.cli import main
from mpitrain.server.security import keys_of, make_keys

PROGRAM = [*TRAIN, "--epochs", "3"]
# Long enough for a second worker to come while the first one trains, on a busy machine too.
LONG = [*TRAIN, "--epochs", "100"]


def last_accuracy(output: str) -> float:
    return float(re.findall(r"test accuracy (\S+)", output)[-1])


def test_a_server_two_workers_and_others_that_are_refused(commands: Commands, tmp_path: Path) -> None:
    """The line that the server prints starts a worker. Workers that differ are refused, and nobody else notices."""
    server = commands.serve(program=LONG)
    output = server.until(r"MPITRAIN_KEY=\S+ mpitrain work \S+ .*\n")
    line = re.search(r"^    (MPITRAIN_KEY=\S+ mpitrain work) (\S+):(\d+) (.*)$", output, re.M)
    assert line
    assert line[2] == socket.gethostname()
    assert line[3] == str(commands.port)
    server.until("there is no worker|ranks: 1")

    examples = tmp_path / "examples"
    shutil.copytree(REPOSITORY / "examples", examples, ignore=shutil.ignore_patterns("__pycache__"))
    with (examples / "datasets.py").open("a") as file:
        file.write("# changed\n")
    (tmp_path / "more" / "made_up-1.5.dist-info").mkdir(parents=True)
    package = tmp_path / "old" / "mpitrain"
    shutil.copytree(REPOSITORY / "mpitrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "errors.py").open("a") as file:
        file.write("# changed\n")
    other_key = make_keys().worker.text
    refused = {
        "datasets.py differs": commands.work(str(examples / "train.py"), *LONG[1:]),
        r"made-up 1\.5, here \(not there\)": commands.work(*LONG, PYTHONPATH=f"{REPOSITORY}:{tmp_path / 'more'}"),
        "mpitrain's code differs": commands.work(*LONG, PYTHONPATH=str(tmp_path / "old")),
        "it has 'seed=1', the server 'seed=0'": commands.work(*LONG, "--seed", "1"),
        # This one cannot come in at all.
        "is not the server with this key": commands.work(
            *LONG, MPITRAIN_KEY=other_key, MPITRAIN_STALL_SECONDS="1", MPITRAIN_HANG_SECONDS="3"
        ),
    }
    for words, worker in refused.items():
        assert worker.end() == 1, worker.output
        assert re.search(words, worker.output), worker.output
    output = server.until(lambda text: text.count(" is refused: ") == 4)
    for words in list(refused)[:4]:
        assert re.search(f" is refused: .*{words}", output), output

    # The line names this host, which may stand for an address that nobody listens at: the loopback will do.
    pasted = f"{line[1]} 127.0.0.1:{line[3]} {line[4]}"
    first = commands.start(["bash", "-c", pasted], XDG_STATE_HOME=str(tmp_path / "elsewhere"))
    second = commands.work(*LONG)
    for command in (server, first, second):
        assert command.end() == 0, command.output
    assert last_accuracy(server.output) > 0.85
    assert "2 workers (0 gone)" in server.output
    assert "test accuracy" not in first.output + second.output
    key_file = commands.state / "mpitrain" / f"serve-{commands.port}.key"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert key_file.read_text().split()[0] not in server.output  # the server's own secret


def test_a_server_that_fails_and_a_worker_that_waits_in_vain(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import sys\nimport mpitrain as mt\nmt.init()\nsys.exit(7)\n")
    server = commands.serve("--hosts", "localhost/cpu", program=[str(tmp_path / "fails.py")])
    assert server.end() == 7, server.output
    worker = commands.work(*PROGRAM, MPITRAIN_STALL_SECONDS="0.5", MPITRAIN_HANG_SECONDS="2")
    assert worker.end() == 1
    waits = f"no program listens at 127.0.0.1:{commands.port}: the server has not begun, or has ended"
    assert f"{waits}; this worker waits until 2 s are over" in worker.output
    assert "Start this worker again when the server is running" in worker.output


def test_two_servers_for_one_job(commands: Commands, tmp_path: Path) -> None:
    """A second one at the same port is refused. A worker that knows two goes from one to the other, with no answer."""
    script = tmp_path / "train.py"
    script.write_text(COUNTING_SCRIPT.replace("MODE", repr("async")))
    program = {name: [str(script), str(tmp_path / name), "0", "0.02"] for name in ("one", "other")}
    _key(commands)
    keys = commands.state / "mpitrain" / f"serve-{commands.port}.key"
    keys.with_name(f"serve-{commands.port + 1}.key").write_bytes(keys.read_bytes())
    keys.with_name(f"serve-{commands.port + 1}.key").chmod(0o600)
    one = commands.serve(program=program["one"])
    one.until("there is no worker|ranks: 1")
    other = commands.start(["mpitrain", "serve", "--port", str(commands.port + 1), *program["other"]])
    places = ",".join(f"127.0.0.1:{commands.port + number}" for number in range(2))
    worker = commands.start(["mpitrain", "work", places, *program["one"]])
    one.until(r"1 here[^\0]*step \d+\n")
    again = commands.serve(program=program["one"])
    assert again.end() == 2
    assert f"port {commands.port} is in use on this machine, perhaps by another server" in again.output
    one.until(lambda text: text.count("step ") >= 3)  # it continues
    one.signal(signal.SIGKILL)
    one.end()
    other.until(r"1 here[^\0]*step \d+\n")
    (tmp_path / "other" / "stop").touch()
    for command in (other, worker):
        assert command.end() == 0, command.output
    assert check_counts(other.output) > 0


def _key(commands: Commands) -> str:
    """The key of a server that has not been started yet."""
    return keys_of(commands.state / "mpitrain" / f"serve-{commands.port}.key").worker.text


def test_no_worker_at_all_and_ctrl_c(commands: Commands) -> None:
    server = commands.serve(program=PROGRAM, MPITRAIN_STALL_SECONDS="1")
    server.until("there is no worker; the server waits for some")
    server.signal(signal.SIGINT)
    assert server.end() in (130, -signal.SIGINT), server.output
    assert "mpitrain: interrupted\n" in server.output
    assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["serve"], "name a script, as in `mpitrain serve train.py`"),
        (["serve", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["serve", "--port", "0", "x.py"], "'0' is not a port; allowed are 1 to 65535"),
        (["serve", "--servers", "0", "x.py"], "'0' is not"),
        (["serve", "--port", "65534", "--servers", "3", TRAIN[0]], "3 servers take the ports 65534 to 65536, but the"),
        (["serve", "--hosts", "a b", TRAIN[0]], "does not begin with the name of a host"),
        (["serve", "--plain", "nope", TRAIN[0]], "--plain nope: there is no such interface; there are .*lo"),
        (["serve", "-i", "hosts", TRAIN[0]], "add --hosts A,B, or leave it out"),
        (["work"], "the following arguments are required: HOST:PORT"),
        (["work", "lab1:5000"], "name a script, as in `mpitrain work HOST:5000 train.py`"),
        (["work", "lab1", TRAIN[0]], "the address 'lab1' is malformed; it must be HOST:PORT"),
        (["work", "lab1:1", TRAIN[0]], "there is no key: MPITRAIN_KEY is not set, and there is no .*serve-1.key"),
        (["run", "-n", "3", "--servers", "3", TRAIN[0]], "3 of them servers, leave none for workers; start at least 4"),
        (["run", "-n", "1", "--servers", "1", TRAIN[0]], "leave none for workers; start at least 2"),
        (
            ["run", "-n", "3", "--servers", "1", "--max-restarts", "1", TRAIN[0]],
            "start the server with `mpitrain serve`",
        ),
    ],
)
def test_wrong_use(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MPITRAIN_KEY", raising=False)
    try:
        code = main(words)
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    assert re.search(text, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_what_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "5100", "--hosts", "localhost/cuda:0-1", "--dry-run", *PROGRAM]) == 0
    first, *workers, last = (output := capfd.readouterr().out).splitlines()
    assert last == f"mpitrain work {socket.gethostname()}:5100 {' '.join(PROGRAM)}"
    assert first == " ".join([sys.executable, *PROGRAM])
    command = f"mpitrain work 127.0.0.1:5100 {' '.join(PROGRAM)}"
    assert [line.rpartition(command)[2] for line in workers] == ["  # on cuda:0", "  # on cuda:1"]
    assert main(["serve", "--port", "5100", "--dry-run", *PROGRAM]) == 0
    assert (shown := capfd.readouterr().out).splitlines() == [first, last]
    assert "MPITRAIN_KEY" not in shown + output


def test_without_pyzmq(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError('no such library')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "XDG_STATE_HOME": str(tmp_path / "state")}
    for words in (["serve"], ["work", "lab1:5000"]):
        command = [sys.executable, "-m", "mpitrain", *words, *PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=REPOSITORY)
        assert done.returncode == 2, done.stderr
        assert "a job with servers needs pyzmq (no such library)" in done.stderr
        assert "pip install 'mpitrain[serve]'" in done.stderr


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes the training that counts its samples, in a mode, and returns its path."""

    def write(mode: str, **changes: str) -> str:
        text = COUNTING_SCRIPT.replace("MODE", repr(mode))
        for old, new in changes.items():
            text = text.replace(f"trainer.{old}()", new)
        (tmp_path / "train.py").write_text(text)
        return str(tmp_path / "train.py")

    return write


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.nightly)])
def test_killed_workers_and_a_killed_server(
    commands: Commands, tmp_path: Path, script: Callable[[str], str], mode: str
) -> None:
    """Every sample counts once in the end, the workers come back by themselves, and end with exit code 0.

    One of them was there before the server.
    """
    program = [script(mode), str(tmp_path / "saved"), "0", "0.01"]
    early = commands.work(*program, MPITRAIN_KEY=_key(commands), MPITRAIN_STALL_SECONDS="1")
    early.until("has not been heard from for . s: no program listens at")
    server = commands.serve(program=program)
    lost, late = commands.work(*program), commands.work(*program)
    server.until(r"3 here[^\0]*step \d+0\n")
    lost.signal(signal.SIGKILL)
    server.until(r"worker \d on .* has gone \(.*\); 2 here")
    joined = commands.work(*program)
    server.until(r"gone[^\0]*has joined; 3 here")
    server.signal(signal.SIGKILL)
    server.end()
    again = commands.serve(program=program)
    again.until(r"has joined; 3 here[^\0]*step \d+\n")
    (tmp_path / "saved/stop").touch()
    for command in (again, early, late, joined):
        assert command.end() == 0, command.output
    begun = re.search(r"resumed from .* at step (\d+)", again.output)
    assert begun and 0 < int(begun[1]) < check_counts(again.output)
    assert "3 workers (0 gone)" in again.output


def run_ranks(*words: str) -> Job:
    return run_command([sys.executable, "-m", "mpitrain", "run", *words])


def test_the_ranks_of_one_mpiexec(tmp_path: Path, script: Callable[[str], str]) -> None:
    """In mode sync, the first work units go out when all workers are there."""
    job = run_ranks("-n", "5", "--servers", "3", script("sync"), str(tmp_path / "saved"), "20", "0")
    assert (job.code, job.left) == (0, []), job.output
    counts, position, steps = json.loads(re.search(r"end (.*)", job.stdout)[1])  # type: ignore[index]
    assert (steps, sum(counts), position["epoch"], position["cursor"]) == (20, 80, 3, 8)
    assert job.stdout.count("end [") == 1
    assert re.search(r"mpitrain: 2 workers \(0 gone\), 40 work units, 20 updates", job.stdout), job.output
    places = ", ".join(rf"server {number} on \S+ \(rank {number}\): 64 B" for number in range(3))
    assert re.search(f"{places} of 192 B of parameters", job.stdout), job.output


@pytest.mark.parametrize(
    ("signal_name", "text"),
    [
        ("SIGKILL", r"rank 1 on \S+ was killed by signal 9"),
        pytest.param(
            "SIGSTOP",
            r"server 1 on \S+ \(rank 1\) is gone \(.*\), and its part of the parameters with it. Start",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_further_server_that_is_lost_ends_the_job(tmp_path: Path, script: Any, signal_name: str, text: str) -> None:
    ends = f"os.kill(os.getpid(), signal.{signal_name})"
    begin = "import signal, threading\nfrom mpitrain.job.start import the_job\n"
    begin += f"if the_job().role.kind == 'shard':\n    threading.Timer(2.0, lambda: {ends}).start()\ntrainer.run()"
    job = run_ranks("-n", "4", "--servers", "2", script("async", run=begin), str(tmp_path / "saved"), "0", "0.01")
    assert job.code not in (0, None), job.output
    assert re.search(text, job.output), job.output
    assert job.left == []


def test_equal_ranks_are_refused(tmp_path: Path) -> None:
    job = run_job(2, COUNTING_SCRIPT.replace("MODE", repr("sync")), str(tmp_path), "5", "0")
    assert job.code != 0
    assert "make the first one a server, `mpitrain run -n 2 --servers 1`, or take mt.Sync()" in job.stderr


def test_known_workers_without_encryption(commands: Commands) -> None:
    """A worker with encryption does not come in."""
    server = commands.serve("--plain", "lo", "--hosts", "localhost/cpux2", program=[*TRAIN, "--epochs", "30"])
    server.until("MPITRAIN_KEY=")
    encrypted = commands.work(*PROGRAM, MPITRAIN_STALL_SECONDS="1", MPITRAIN_HANG_SECONDS="3")
    server.until("2 here")
    assert server.end() == 0, server.output
    assert last_accuracy(server.output) > 0.85
    assert "2 workers (0 gone)" in server.output
    assert f"mpitrain work --plain 127.0.0.1:{commands.port} " in server.output
    named = {line.split("]")[0] for line in server.output.splitlines() if line.startswith(f"[{socket.gethostname()}:")}
    assert named == {f"[{socket.gethostname()}:{number}" for number in (1, 2)}
    assert encrypted.end() == 1


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.nightly), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_ends_server_and_known_workers(commands: Commands, number: signal.Signals, code: int) -> None:
    """And nothing is left: see Commands. Ctrl-C: test_shown_servers.py."""
    server = commands.serve("--hosts", "localhost/cpux2", program=[*TRAIN, "--epochs", "100000"])
    server.until("step 24")
    server.signal(number)
    assert server.end() == code, server.output
