"""Connections that are open before mpiexec needs them. tests/cluster/test_restart_over_hosts.py has them in use."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from jobs import until
from mpitrain.launch.processes import alive_below, children
from mpitrain.launch.ssh import open_masters

# A stand-in for ssh, which stays connected.
STAYS = "#!/bin/sh\necho $$ >> {asked}\nexec sleep 1000\n"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with a line for each ssh that was started."""
    program, file = tmp_path / "bin/ssh", tmp_path / "asked"
    program.parent.mkdir()
    program.write_text(STAYS.format(asked=file))
    program.chmod(0o755)
    file.touch()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
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
