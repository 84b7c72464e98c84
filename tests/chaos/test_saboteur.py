"""A saboteur on a host: what it finds, what it may fill, and that its fault is undone whoever is killed meanwhile."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jobs import HANG_SECONDS, clean_environment, until
from mpitrain.launch.shared_files import FOLDER, lock, of_ranks
from testbed.chaos import crew, saboteur
from testbed.chaos.saboteur import Saboteur, refusal_to_fill


def test_what_a_saboteur_imports_is_sent_with_it() -> None:
    *sent, (name, text) = crew.saboteur()
    assert name == "testbed.chaos.saboteur"
    own = [line.split()[1] for line in text.splitlines() if line.startswith(("from mpitrain", "from testbed"))]
    assert own and set(own) <= {module for module, _ in sent}


def test_what_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in /tmp, and a folder that a rank has left which was killed while MPI started."""
    monkeypatch.setattr(saboteur, "_LEAVE_SECONDS", 0.0)
    here, token = Saboteur({"launcher": "nowhere 1 2", "folder": ""}), secrets.token_hex(4)
    here._tokens.append(token)
    assert here._left() == []
    with (
        tempfile.NamedTemporaryFile(prefix=f"mpitrain-roll-call-{token}", dir="/tmp") as file,
        tempfile.TemporaryDirectory(prefix=of_ranks(token), dir=FOLDER) as folder,
        tempfile.TemporaryDirectory(prefix=of_ranks(secrets.token_hex(4)), dir=FOLDER),
    ):
        (Path(folder) / "sm_segment.a").touch()
        descriptor = lock(folder)  # else another job on this machine may remove it
        assert here._left() == [folder, file.name]
        os.close(descriptor)


SABOTEUR = """
import pathlib, sys
from testbed.chaos import saboteur
from testbed.chaos.saboteur import Outage
saboteur._SILENCE_SECONDS = 1.0
one = saboteur.Saboteur({"launcher": "nowhere 1 2", "folder": ""})
one._outage = Outage(7, lambda: None, lambda: pathlib.Path(sys.argv[1]).touch(), 600.0)
one.run()
"""


@pytest.mark.parametrize("is_cut", [True, False], ids=["a cable that was cut", "chaos killed"])
def test_without_chaos_it_undoes_its_fault_and_ends(tmp_path: Path, is_cut: bool) -> None:
    command = [sys.executable, "-c", SABOTEUR, str(tmp_path / "as before")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if not is_cut:
            process.stdin.close()
        said = process.stdout.read()
        assert process.wait(HANG_SECONDS) == 0
    assert '{"undone": 7}' in said and (tmp_path / "as before").exists()


# The fault makes a file, and undoing it removes the file. A test inserts the line with what happens in between.
PROGRAM = """
import os, pathlib, signal, sys, time
from testbed.chaos.saboteur import Outage
file = pathlib.Path(sys.argv[1])
outage = Outage(1, file.touch, lambda: file.unlink(missing_ok=True), SECONDS)
while not file.exists():
    time.sleep(0.01)
THEN
"""
WAIT = "while not outage.is_over():\n    time.sleep(0.01)\nprint(file.exists())"


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    env, pipe = clean_environment(), subprocess.PIPE
    return subprocess.run(command, env=env, stdout=pipe, stderr=pipe, text=True, timeout=HANG_SECONDS, check=False)


def held(folder: Path, seconds: float, then: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    source = PROGRAM.replace("SECONDS", str(seconds)).replace("THEN", then)
    return folder / "fault", run([sys.executable, "-c", source, str(folder / "fault")])


@pytest.mark.parametrize(
    ("seconds", "then", "is_left"),
    [
        pytest.param(0.3, WAIT, False, id="in time"),
        pytest.param(1000.0, "outage.end()\nprint(file.exists())", False, id="at once"),
        pytest.param(1000.0, f"os.kill(outage._keeper, signal.SIGKILL)\n{WAIT}", False, id="keeper killed"),
        # By a signal that can be ignored, a keeper cannot be ended.
        pytest.param(
            1000.0,
            "for number in (1, 2, 15):\n    os.kill(outage._keeper, number)\ntime.sleep(0.3)\nprint(file.exists())",
            True,
            id="keeper told to end",
        ),
    ],
)
def test_a_fault_is_undone(tmp_path: Path, seconds: float, then: str, is_left: bool) -> None:
    _, done = held(tmp_path, seconds, then)
    assert (done.returncode, done.stdout) == (0, f"{is_left}\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_undone_if_the_process_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    """The keeper closes its output. Otherwise the pipe of `held` would wait for its end, as an ssh connection would."""
    file, done = held(tmp_path, 1000.0, f"os.kill(os.getpid(), {int(number)})")
    assert done.returncode == -number, done.stderr
    until(lambda: not file.exists(), "the fault is still in force")


def test_what_may_be_filled(tmp_path: Path) -> None:
    """A small disk that nobody else needs."""
    for folder in ("/", "/dev/shm", "/tmp"):
        assert "which others need" in refusal_to_fill(folder)
    assert "No such file or directory" in refusal_to_fill(str(tmp_path / "absent"))
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    script = (
        f"mount -t tmpfs -o size=SIZE none {tmp_path} && "
        f"{sys.executable} -c 'from testbed.chaos.saboteur import refusal_to_fill as r; print(r(\"{tmp_path}\"))'"
    )
    for size, said in (("1m", ""), ("300m", f"{tmp_path} is on a file system of 300 MiB; chaos fills at most 256 MiB")):
        done = run(["unshare", "--mount", "sh", "-c", script.replace("SIZE", size)])
        assert done.stdout == f"{said}\n", done.stderr
