"""Connections to hosts: what is sent there as text, masters that are open early, why ssh fails, and silence."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from programs import program

import mpitrain
from jobs import HANG_SECONDS, clean_environment, until
from mpitrain.launch import connections
from mpitrain.launch.connections import AGENT, connect, explain
from mpitrain.launch.jobs import ROSTER
from mpitrain.launch.processes import alive_below, children
from mpitrain.launch.serving import _MODULES
from mpitrain.launch.ssh import open_masters


@pytest.mark.parametrize("modules", [AGENT, ROSTER], ids=lambda modules: modules[-1])
def test_each_module_comes_after_those_that_it_imports(modules: Sequence[str]) -> None:
    for place, module in enumerate(modules):
        assert set(own_imports(module)) <= set(modules[:place]), module


def own_imports(module: str) -> Iterator[str]:
    """The modules of mpitrain that this module imports when it runs. Imports for type checkers alone do not count."""
    tree = ast.parse((Path(mpitrain.__file__).parent / f"{module.replace('.', '/')}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("mpitrain."):
                yield (inner.module or "").removeprefix("mpitrain.")


# Connects to this host with the package as it is, and again when one of the modules has another version.
TWICE = """
import pathlib, sys, time
from mpitrain.launch.connections import connect
from mpitrain.launch.jobs import ROSTER
import mpitrain

for _ in range(2):
    connection = connect("localhost", True, {}, 0.0, ROSTER)
    while not connection.receive(0.0) and not connection.is_closed:
        connection.flush()
        time.sleep(0.05)
    if connection.is_closed:
        sys.exit(connection.why_closed())
    connection.hang_up()
    connection.close(10.0)
    path = pathlib.Path(mpitrain.__file__).parent / "launch" / "roster.py"
    path.write_text("raise SystemExit('another version')\\n" + path.read_text())
"""


def test_an_update_of_the_package_does_not_reach_a_running_process(tmp_path: Path) -> None:
    shutil.copytree(Path(mpitrain.__file__).parent, tmp_path / "mpitrain")
    environment = clean_environment({"PYTHONPATH": str(tmp_path)})
    command = [sys.executable, "-c", TWICE]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "another version" in (tmp_path / "mpitrain/launch/roster.py").read_text()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with a line for each ssh that was started. A program stands for ssh, and stays connected."""
    file = tmp_path / "asked"
    file.touch()
    ssh = program(tmp_path / "bin/ssh", f"echo $$ >> {file}\nexec sleep 1000")
    monkeypatch.setenv("PATH", f"{ssh.parent}:/usr/bin:/bin")
    return file


def test_they_are_no_processes_of_the_job_and_end(asked: Path) -> None:
    """Otherwise a job that ends would kill them as its own, and fail."""
    before = alive_below(set())
    with open_masters(["a", "b"], Path("/tmp")):
        until(lambda: len(asked.read_text().splitlines()) == 2)
        assert alive_below(set()) == before
        started = {int(line) for line in asked.read_text().split()}
        assert started <= children()
    assert not started & children()


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs ssh")
def test_an_ssh_of_mpiexec_becomes_no_master(tmp_path: Path) -> None:
    """Whatever the user's own settings are: it would stay behind, as a process of the job."""
    settings = tmp_path / "config"
    settings.write_text("ControlMaster auto\nControlPersist 10m\n")
    with open_masters([], Path("/tmp")) as options:
        said = subprocess.run(
            ["ssh", "-G", "-F", settings, *options, "node7"], capture_output=True, text=True, check=True
        )
    assert "controlmaster false" in said.stdout.splitlines()


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs ssh")
@pytest.mark.parametrize("folder", ["/tmp/tmp_x-1.+2", "/tmp/" + "x" * 44])
def test_where_ssh_looks_for_them(folder: str) -> None:
    """In that folder, at a path that is not too long for a socket, even while ssh makes it."""
    with open_masters([], Path(folder)) as options:
        words = ["ssh", "-G", *options, "node7"]
        said = subprocess.run(words, capture_output=True, text=True, check=True)
    (path,) = [line.partition(" ")[2] for line in said.stdout.splitlines() if line.startswith("controlpath ")]
    assert Path(path).parent == Path(folder)
    assert len(path) + len(".") + 16 < 108


@pytest.mark.parametrize("folder", ["/tmp/" + "x" * 45, "/tmp/a b", "/tmp/100%", "/tmp/${HOME}"])
def test_a_folder_in_which_they_cannot_be(asked: Path, folder: str) -> None:
    """ssh would end with an error there, so mpiexec logs in as always."""
    with open_masters(["a"], Path(folder)) as options:
        assert options == []
    assert asked.read_text() == ""


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("@@ REMOTE HOST IDENTIFICATION HAS CHANGED! @@\nHost key verification failed.", "`mpitrain cluster trust b`"),
        ("No ED25519 host key is known for b\nHost key verification failed.", "For a node of this cluster, run"),
        ("u@b: Permission denied (publickey).", "Is this the cluster's user"),
        ("ssh: Could not resolve hostname b: Name or service not known", "`getent hosts b`"),
        ("ssh: connect to host b port 22: Connection refused", "`systemctl start ssh`"),
        ("ssh: connect to host b port 22: Connection timed out", "Is it switched on"),
        ("bash: line 1: /usr/bin/python3: No such file or directory", "Install python3 there"),
    ],
)
def test_why_ssh_failed(words: str, remedy: str) -> None:
    text = explain("b", words, 255)
    assert text.startswith(f"b: {words.splitlines()[-1]}: ")
    assert remedy in text
    assert explain("b", "", 137) == "b: ended with code 137 and wrote nothing"


def test_another_host_answers_at_the_address(tmp_path: Path) -> None:
    """ssh names the key that it was shown, and the file of those that are known."""
    known = tmp_path / "known_hosts"
    for name in ("b", "c"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    known.write_text("".join(f"{name},10.0.0.1 {(tmp_path / name).with_suffix('.pub').read_text()}" for name in "bc"))
    listed = subprocess.check_output(["ssh-keygen", "-l", "-f", str(known)], text=True).splitlines()
    known.write_text(f"# Made by mpitrain's cluster/setup.yml\n{known.read_text()}")
    for line, expected in zip(listed, ("`mpitrain cluster trust b`", "c answers at its address"), strict=True):
        words = (
            f"@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n{line.split()[1]}.\n"
            f"Offending ED25519 key in {known}:1\nHost key verification failed."
        )
        assert expected in explain("b", words, 255)


# The main thread hangs where it never looks, as in a read of a dead share.
STUCK = """
import sys, time
from mpitrain.launch import hearing
hearing.STUCK_SECONDS = 1.0
hearing.Hearing(float(sys.argv[1]), lambda: print("last", flush=True))
time.sleep(600)
"""


@pytest.mark.parametrize("silence_seconds", [1.0, 0.0])
def test_a_main_thread_that_hangs(silence_seconds: float) -> None:
    """Silence ends the process on another host; where the launcher is, its hanging up."""
    command = [sys.executable, "-c", STUCK, str(silence_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(4):  # longer than both times
            process.stdin.write("x")
            process.stdin.flush()
            time.sleep(1.0)
            assert process.poll() is None or silence_seconds  # a busy machine may be late with a beat
        if not silence_seconds:
            process.stdin.close()
        assert process.stdout.read() == "last\n"
        assert process.wait(HANG_SECONDS) == 1


def test_a_network_that_breaks_during_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The far side has not got all of its own text, and ends."""
    *options, program = connections.BOOT
    assert "signal.alarm(60)" in program
    monkeypatch.setattr(connections, "BOOT", (*options, program.replace("signal.alarm(60)", "signal.alarm(1)")))
    monkeypatch.setattr(connections.Connection, "send", lambda *_: None)
    connection = connect("here", is_this_machine=True, wish={}, now=0.0)
    assert connection.process.wait(HANG_SECONDS) == -14
    connection.hang_up()
    connection.leave()


def test_workers_of_a_launcher_that_has_fallen_silent() -> None:
    """Their host notices it, also if they run for ever."""
    wish = {"silence_seconds": 1.0, "folder": "/", "command": ["sleep", "600"], "variables": [{"PATH": "/bin"}]}
    connection = connect("here", is_this_machine=True, wish=wish, now=0.0, modules=_MODULES)
    until(lambda: connection.flush() or connection.process.poll() is not None)
    assert connection.process.poll() == 0
    connection.hang_up()
    connection.leave()
