"""What every rank of a job over several hosts runs first."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from jobs import Job, run_command
from mpitrain.launch.rank import settings_of
from mpitrain.watching.roll_call import listen, receive

SETTINGS = {"0-1": {"UCX_NET_DEVICES": "eno1"}, "2-9": {"UCX_NET_DEVICES": "enp3s0"}}
PROGRAM = "import os; print(os.getpid(), os.environ.get('UCX_NET_DEVICES'))"


def start(roll_call: Path, rank: str) -> Job:
    command = [sys.executable, "-m", "mpitrain.launch.rank", json.dumps(SETTINGS), sys.executable, "-c", PROGRAM]
    return run_command(command, env={"_MPITRAIN_ROLL_CALL": str(roll_call), "PMI_RANK": rank})


def test_settings_of_a_rank() -> None:
    interfaces = [settings_of(rank, SETTINGS).get("UCX_NET_DEVICES") for rank in (1, 9, 10)]
    assert interfaces == ["eno1", "enp3s0", None]


def test_it_becomes_the_program_with_the_same_process(tmp_path: Path) -> None:
    roll_call = tmp_path / "roll_call"
    with listen(str(roll_call)) as listener:
        job = start(roll_call, "3")
        assert job.code == 0, job.output
        pid, interface = job.stdout.split()
        line, _ = listener.accept()
        with line:
            said = receive(line)
    assert interface == "enp3s0"
    assert (said.rank, said.pid, said.record) == (3, int(pid), None)
    os.close(said.process)


def test_without_an_agent_nothing_is_made(tmp_path: Path) -> None:
    """And a file that is there is left alone."""
    for name in ("roll_call", "file"):
        job = start(tmp_path / name, "0")
        assert (job.code, job.stdout.split()[1]) == (0, "eno1"), job.output
        made = os.listdir(tmp_path)  # noqa: PTH208
        assert made == ([] if name == "roll_call" else ["file"])
        (tmp_path / "file").write_text("mine")
    assert (tmp_path / "file").read_text() == "mine"


def refusal(path: Path, why: str) -> str:
    return (
        f"rank 0 on {socket.gethostname()} cannot answer the roll call: _MPITRAIN_ROLL_CALL is {str(path)!r}: {why}. "
        "It must be the socket that mpitrain run has made as the same user; leave the variable to mpitrain run: "
        "unset _MPITRAIN_ROLL_CALL"
    )


def test_a_path_that_cannot_be_a_roll_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file/roll_call"
    job = start(path, "0")
    assert (job.code, job.stdout) == (1, "")
    assert job.stderr == f"mpitrain: {refusal(path, 'Not a directory')}\n"
    script = "import mpitrain as mt; mt.init(); print('it continued')"
    environment = {"_MPITRAIN_ROLL_CALL": str(path), "_MPITRAIN_EXPECTED_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}
    job = run_command([sys.executable, "-c", script], env=environment)
    assert (job.code, job.stdout) == (1, "")
    assert f"LaunchError: {refusal(path, 'Not a directory')}\n" in job.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as somebody else")
def test_the_socket_of_somebody_else(tmp_path: Path) -> None:
    """The other user gets nothing: no descriptor of the process, and no line."""
    path = tmp_path / "roll_call"
    os.seteuid(65534)
    try:
        # The socket is in the parent's folder, as if that were shared: only the listener's user counts.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.seteuid(0)
        listener.bind(str(path))
        os.seteuid(65534)
        listener.listen()
    finally:
        os.seteuid(0)
    with listener:
        job = start(path, "0")
        assert job.stderr == f"mpitrain: {refusal(path, 'user 65534 listens there, and the rank runs as user 0')}\n"
        assert (job.code, job.stdout) == (1, "")
        line, _ = listener.accept()
        with line:
            assert receive(line) is None
