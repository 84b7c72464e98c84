"""The socket of a roll call, what killed jobs have left beside it, and when the kernel closed what a rank had open."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from mpitrain.watching import roll_call
from mpitrain.watching.census import Census
from mpitrain.watching.roll_call import PREFIX, appear, connect_to_self, listen, receive, when_closed

# An agent that is killed has no time to remove its socket.
AGENT = """
import sys, time
from mpitrain.watching.census import Census
census = Census(sys.argv[1])
print("listens", flush=True)
time.sleep(1000)
"""


def agent(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", AGENT, str(path)], stdout=subprocess.PIPE, text=True)
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
        process = agent(path)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert path.is_socket()
    living = agent(lives)
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
        assert line is not None, "the other job's agent still listens"
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
    """The job starts all the same. Without an agent, nothing is made."""
    assert appear(str(tmp_path / "roll_call"), 0) is None
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o300)
    census = Census(str(folder / f"{PREFIX}own"))
    census.close()
    assert (folder / f"{PREFIX}own").is_socket()
    folder.chmod(0o700)


TICKS_SECONDS = 0.02  # the kernel's ticks, at both ends of a time


def test_the_time_of_a_kill_is_known_however_late_somebody_asks() -> None:
    pair = connect_to_self()
    assert pair is not None
    near, far = pair
    child = os.fork()
    if child == 0:
        far.close()
        signal.pause()
    near.close()
    before = time.monotonic()
    assert before <= when_closed(far.fileno()) <= time.monotonic()  # it is still open
    time.sleep(1)
    before = time.monotonic()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    after = time.monotonic()
    time.sleep(1)
    assert before - TICKS_SECONDS < when_closed(far.fileno()) < after + TICKS_SECONDS
    far.close()


# A rank that makes a connection after it has answered the roll call, as MPI does in MPI_Init.
RANK = """
import socket, sys, time
from mpitrain.watching.activity import publish
activity = publish(0)
activity.appear(sys.argv[1])
connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
time.sleep(1000)
"""


def test_the_end_of_a_rank_closes_the_witness_and_the_line_before_what_mpi_has_open(tmp_path: Path) -> None:
    """Other ranks notice the end when MPI's files close, and end too; on a busy host maybe before all is closed."""
    path = str(tmp_path / "roll_call")
    with ExitStack() as stack:
        listener, mpi = (stack.enter_context(each) for each in (listen(path), socket.create_server(("127.0.0.1", 0))))
        rank = subprocess.Popen([sys.executable, "-c", RANK, path, str(mpi.getsockname()[1])])
        stack.callback(rank.wait)
        stack.callback(rank.kill)
        connection, line = (stack.enter_context(each.accept()[0]) for each in (mpi, listener))
        said = receive(line)
        for descriptor in (said.process, said.record, said.witness):
            stack.callback(os.close, descriptor)
        names = {connection.fileno(): "mpi", line.fileno(): "line", said.witness: "witness"}
        events = stack.enter_context(select.epoll())  # epoll reports the events in their order
        for descriptor in names:
            events.register(descriptor, select.EPOLLIN)
        assert events.poll(0) == []
        rank.kill()
        rank.wait()
        assert [names[descriptor] for descriptor, _ in events.poll()] == ["witness", "line", "mpi"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")
def test_without_a_loopback_interface_there_is_none() -> None:
    script = "from mpitrain.watching.roll_call import connect_to_self; print(connect_to_self())"
    done = subprocess.run(["unshare", "-n", sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    before = time.monotonic()
    assert when_closed(None) >= before
