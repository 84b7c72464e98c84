"""Connections that are open before mpiexec needs them, and what is said when ssh to a host fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from programs import program

from jobs import until
from mpitrain.launch.connections import explain
from mpitrain.launch.processes import alive_below, children
from mpitrain.launch.ssh import open_masters


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
    known.write_text(f"# keys\n{known.read_text()}")
    for line, expected in zip(listed, ("`mpitrain cluster trust b`", "c answers at its address"), strict=True):
        words = (
            f"@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n{line.split()[1]}.\n"
            f"Offending ED25519 key in {known}:1\nHost key verification failed."
        )
        assert expected in explain("b", words, 255)
