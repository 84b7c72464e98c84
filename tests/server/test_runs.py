"""Runs in processes of their own: killed workers, a killed server, ranks of one mpiexec."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from counting import COUNTING_SCRIPT, check_counts

from free_ports import free_address
from jobs import REPOSITORY, TOKEN, clean_environment, kill_all, processes_of, run_command, run_job, until
from mpitrain.server.security import keys_of


class Processes:
    """Servers and workers of one script, with their output in files."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.address, self._folder = free_address(), folder
        self._script = folder / "train.py"
        self._script.write_text(COUNTING_SCRIPT.replace("MODE", repr(mode)))
        (folder / "worker key").write_text(keys_of(folder / "server key").worker.text)
        self.token = f"serve-{os.getpid()}-{id(self)}"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, kind: str, last: int, seconds: float = 0.01) -> tuple[subprocess.Popen[bytes], Path]:
        output = self._folder / f"{kind} {len(self.started)}"
        told = {"_MPITRAIN_SERVE_KIND": kind, "_MPITRAIN_SERVE_ADDRESS": self.address, TOKEN: self.token}
        told["_MPITRAIN_SERVE_KEY"] = str(self._folder / f"{kind} key")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(self._script), str(self._folder / "saved"), str(last), str(seconds)],
                env=clean_environment(told),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
            )
        self.started.append(process)
        return process, output


@contextmanager
def processes(folder: Path, mode: str) -> Iterator[Processes]:
    made = Processes(folder, mode)
    try:
        yield made
    finally:
        kill_all(made.token)
        for process in made.started:
            process.wait()
    assert processes_of(made.token) == []


def said(output: Path, text: str) -> Any:
    return re.search(text, output.read_text())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_workers_and_a_killed_server(tmp_path: Path, mode: str) -> None:
    """Every sample counts once in the end, the workers come back by themselves, and end with exit code 0."""
    last = 0  # none: a file ends the run
    with processes(tmp_path, mode) as run:
        server, output = run.start("server", last)
        workers = [run.start("worker", last)[0] for _ in range(3)]
        until(lambda: said(output, "step 20\n") and said(output, "has joined; 3 here"), "no step 20 with 3 workers")
        workers[0].send_signal(signal.SIGKILL)
        until(lambda: said(output, r"worker \d on .* has gone \(.*\); 2 here"), "nobody has gone")
        workers.append(run.start("worker", last)[0])
        until(lambda: said(output, r"gone[^\0]*has joined; 3 here"), "nobody has joined")
        server.send_signal(signal.SIGKILL)
        server.wait()
        again, output = run.start("server", last)
        until(lambda: said(output, r"has joined; 3 here[^\0]*step \d+\n"), "workers did not come back")
        (tmp_path / "saved" / "stop").touch()
        for process in [again, *workers[1:]]:
            assert process.wait(300) == 0, output.read_text()
        begun = int(said(output, r"resumed from .* at step (\d+)")[1])
        assert 20 <= begun < check_counts(output.read_text())


@pytest.mark.parametrize("num_servers", [1, 3])
def test_the_ranks_of_one_mpiexec(tmp_path: Path, num_servers: int) -> None:
    """Two runs have the same bits in mode sync: the first jobs go out when all workers are there."""
    script = tmp_path / "train.py"
    script.write_text(COUNTING_SCRIPT.replace("MODE", repr("sync")))
    numbers = ["-n", str(2 + num_servers), "--servers", str(num_servers)]
    command = [sys.executable, "-m", "mpitrain", "run", *numbers, str(script)]
    job = run_command([*command, str(tmp_path / "saved"), "20", "0"])
    assert job.code == 0, job.output
    assert job.left == []
    counts, position, steps = json.loads(re.search(r"end (.*)", job.stdout)[1])  # type: ignore[index]
    assert (steps, sum(counts), position["epoch"], position["cursor"]) == (20, 80, 3, 8)
    assert job.stdout.count("end [") == 1
    assert re.search(r"mpitrain: 2 workers \(0 gone\), 40 work units, 20 updates", job.stdout), job.output
    divided = (
        r"server 0 on \S+ \(rank 0\): 64 B, server 1 on \S+ \(rank 1\): 64 B, server 2 on \S+ \(rank 2\): "
        "64 B of 192 B of parameters"
    )
    assert bool(re.search(divided, job.stdout)) == (num_servers == 3)


@pytest.mark.parametrize(
    ("signal_name", "text"),
    [
        ("SIGKILL", r"rank 1 on \S+ was killed by signal 9"),
        ("SIGSTOP", r"server 1 on \S+ \(rank 1\) is gone \(.*\), and its part of the parameters with it. Start"),
    ],
)
def test_a_further_server_that_is_lost_ends_the_job(tmp_path: Path, signal_name: str, text: str) -> None:
    script = tmp_path / "train.py"
    ends = f"os.kill(os.getpid(), signal.{signal_name})"
    script.write_text(
        COUNTING_SCRIPT.replace("MODE", repr("async")).replace(
            "trainer.run()",
            "import signal, threading\nfrom mpitrain.job.start import the_job\n"
            f"if the_job().role.kind == 'shard':\n    threading.Timer(2.0, lambda: {ends}).start()\ntrainer.run()",
        )
    )
    command = [sys.executable, "-m", "mpitrain", "run", "-n", "4", "--servers", "2", str(script)]
    job = run_command([*command, str(tmp_path / "saved"), "0", "0.01"])
    assert job.code not in (0, None), job.output
    assert re.search(text, job.output), job.output
    assert job.left == []


def test_equal_ranks_are_refused(tmp_path: Path) -> None:
    job = run_job(2, COUNTING_SCRIPT.replace("MODE", repr("sync")), str(tmp_path), "5", "0")
    assert job.code != 0
    assert "make the first one a server, `mpitrain run -n 2 --servers 1`, or take mt.Sync()" in job.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["-n", "3", "--servers", "3"], "3 ranks, 3 of them servers, leave none for workers; start at least 4"),
        (["-n", "1", "--servers", "1"], "leave none for workers; start at least 2"),
        (["-n", "3", "--servers", "1", "--restarts", "1"], "start the server with `mpitrain serve`"),
    ],
)
def test_requests_that_cannot_be_met(tmp_path: Path, options: list[str], text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    job = run_command([sys.executable, "-m", "mpitrain", "run", *options, str(script)])
    assert job.code == 2, job.output
    assert text in job.stderr
