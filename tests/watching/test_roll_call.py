"""The socket of a roll call, and what killed jobs have left beside it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from mpitrain.watching import roll_call
from mpitrain.watching.census import Census
from mpitrain.watching.roll_call import PREFIX, appear

# A guard that is killed has no time to remove its socket.
GUARD = """
import sys, time
from mpitrain.watching.census import Census
census = Census(sys.argv[1])
print("listens", flush=True)
time.sleep(1000)
"""


def guard(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", GUARD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "listens\n"
    return process


def age(path: Path) -> None:
    """As if it had been made two minutes ago."""
    made = path.lstat().st_mtime - 120
    os.utime(path, (made, made), follow_symlinks=False)


def mounted_as(system: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """As if the folder were on such a file system."""
    device, mounts = folder.stat().st_dev, folder.parent / f"{folder.name}-mounts"
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(f"1 27 0:0 / /proc rw - proc proc rw\n2 1 {number} / / rw shared:1 - {system} source rw\n")
    patch.setattr(roll_call, "_MOUNTS", str(mounts))


def test_what_killed_jobs_have_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted_as("ext4", tmp_path, monkeypatch)
    left, young, lives, silent, file = (tmp_path / f"{PREFIX}{name}" for name in ("a", "b", "c", "d", "e"))
    for path in (left, young):
        process = guard(path)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert path.is_socket()
    living = guard(lives)
    try:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as made:
            made.bind(str(silent))  # and does not listen yet
            file.touch()
            (tmp_path / "another").symlink_to(left)
            for path in (left, lives, silent, file):
                age(path)
            census = Census(str(tmp_path / f"{PREFIX}own"))
            names = sorted(path.name for path in tmp_path.iterdir())
            census.close()
            assert names == ["another", *sorted(path.name for path in (young, lives, silent, file)), f"{PREFIX}own"]
        line = appear(str(lives), 0)
        assert line is not None, "the other job's guard still listens"
        line.close()
    finally:
        living.kill()
        living.communicate()


@pytest.mark.parametrize(("system", "num_left"), [("nfs4", 1), ("fuse.sshfs", 1), ("xfs", 0)])
def test_a_share_is_not_swept(system: str, num_left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a socket of another machine, whose job may live, looks like one that is left."""
    mounted_as(system, tmp_path, monkeypatch)
    other = tmp_path / f"{PREFIX}other"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as made:
        made.bind(str(other))
    age(other)
    Census(str(tmp_path / f"{PREFIX}own")).close()
    assert len([*tmp_path.glob(other.name)]) == num_left


def test_a_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    """The job starts all the same."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o300)
    census = Census(str(folder / f"{PREFIX}own"))
    census.close()
    assert (folder / f"{PREFIX}own").is_socket()
    folder.chmod(0o700)
