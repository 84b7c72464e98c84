"""What every rank of a job over several hosts runs first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from jobs import run_command
from mpitrain.launch.rank import settings_of
from mpitrain.watching.roll_call import listen, receive

SETTINGS = {"0-1": {"UCX_NET_DEVICES": "eno1"}, "2-9": {"UCX_NET_DEVICES": "enp3s0"}}
PROGRAM = "import os; print(os.getpid(), os.environ.get('UCX_NET_DEVICES'))"


def run(roll_call: Path, rank: str) -> str:
    command = [sys.executable, "-m", "mpitrain.launch.rank", json.dumps(SETTINGS), sys.executable, "-c", PROGRAM]
    job = run_command(command, env={"_MPITRAIN_ROLL_CALL": str(roll_call), "PMI_RANK": rank})
    assert job.code == 0, job.output
    return job.stdout.strip()


def test_settings_of_a_rank() -> None:
    assert settings_of(1, SETTINGS) == {"UCX_NET_DEVICES": "eno1"}
    assert settings_of(9, SETTINGS) == {"UCX_NET_DEVICES": "enp3s0"}
    assert settings_of(10, SETTINGS) == {}


def test_it_becomes_the_program_with_the_same_process(tmp_path: Path) -> None:
    roll_call = tmp_path / "roll_call"
    with listen(str(roll_call)) as listener:
        pid, interface = run(roll_call, "3").split()
        line, _ = listener.accept()
        with line:
            said = receive(line)
    assert interface == "enp3s0"
    assert said is not None
    assert (said.rank, said.pid, said.record) == (3, int(pid), None)
    assert said.process is not None
    os.close(said.process)


def test_without_a_guard_nothing_is_made(tmp_path: Path) -> None:
    assert run(tmp_path / "roll_call", "0").endswith("eno1")
    assert os.listdir(tmp_path) == []  # noqa: PTH208
