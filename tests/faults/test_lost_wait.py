"""A job waits for hosts that were just lost: what `ps`, `top`, `tell`, `kill` and signals do meanwhile.

The launcher is real. On one machine no host can be lost, so only its verdict is made up: after a failure it lacks a
host, which never answers. tests/cluster/test_elastic.py has real hosts, which come back.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.failing import HERE, nightly
from faults.test_saving import DIES, SAVES
from faults.training import train
from jobs import HANG_SECONDS, Job, run_command, until
from mpitrain.launch.time_limit import EXIT_CODE

GONE = "gone.invalid"
REASON = f"only {HERE} of {HERE}, {GONE} can take part, and the job needs 2"
LAUNCHER = f"""
import sys
from mpitrain.cli import main
from mpitrain.launch import lost_wait, policy
from mpitrain.launch.where import Verdict

policy.judge = lambda state, *_: Verdict(reason={REASON!r}, left=state.hosts.hosts, lost=({GONE!r},))
lost_wait.missing = lambda state: [{GONE!r}]
sys.exit(main())
"""


def mpitrain(*arguments: str) -> Job:
    return run_command([sys.executable, "-m", "mpitrain", *arguments])


def row(folder: Path) -> list[str]:
    """The columns of `mpitrain ps` for the job in this folder; none: it is not listed."""
    lines = [line for line in mpitrain("ps", "--hosts", "localhost").stdout.splitlines() if str(folder) in line]
    return re.split(r"  +", lines[0]) if lines else []


def waits(folder: Path, meanwhile: Callable[[subprocess.Popen[str], str], None]) -> tuple[Job, str]:
    """A job of two ranks that lacks a host after step 7; `meanwhile` gets its id. Return what it has said, too."""
    (folder / "waits.py").write_text(LAUNCHER)
    said: list[str] = []

    def during(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        while "Waiting for" not in "".join(said[-1:]):
            said.append(process.stderr.readline())
            assert said[-1], said
        until(lambda: " ".join(row(folder)[2:3]).startswith("waits"))
        meanwhile(process, row(folder)[0])
        said.append(process.stderr.read())

    job = train(folder, DIES, launcher=[str(folder / "waits.py")], hooks=SAVES, during=during)
    assert job.left == []
    assert not (folder / "stepped").exists(), "a step was made"
    text = "".join(said)
    follows = f"{REASON}. Waiting for {GONE}, up to 300 s; `mpitrain tell JOB stop` saves the state and ends the job\n"
    assert f" on {HERE} was killed by signal 9; {follows}" in text, text
    return job, text


def test_it_can_be_seen_and_told_to_stop(tmp_path: Path) -> None:
    answers: dict[str, Job] = {}

    def look(_: subprocess.Popen[str], job: str) -> None:
        answers["top"] = mpitrain("top", "--json", job)
        answers["ps"] = mpitrain("ps", "--hosts", "localhost", "--json", job)
        for word in ("pause", "stacks", "stop"):
            answers[word] = mpitrain("tell", "--hosts", "localhost", job, word)

    job, said = waits(tmp_path, look)
    (live,) = json.loads(answers["top"].stdout)["jobs"]
    assert live["state"] == "waits"
    assert "Waiting for" in live["events"][-1]["text"]
    (listed,) = json.loads(answers["ps"].stdout)["jobs"]
    assert re.fullmatch(rf"waits for {GONE} until \d\d:\d\d:\d\d", listed["state"])
    assert (listed["ranks"], listed["launcher"]) == ({}, HERE)
    for word in ("pause", "stacks"):
        refused = rf"it has no ranks now: it waits for {GONE} until \S+ `stop` saves its state and ends it"
        assert re.search(refused, " ".join(answers[word].stderr.split())), answers[word].output
        assert answers[word].code == 1
    assert f"it waits no longer for {GONE}; it saves its state and ends" in answers["stop"].stdout
    assert f"mpitrain: told to stop; {REASON}. Starting again on {HERE} only to save the state\n" in said
    assert said.endswith(f"mpitrain: {REASON}: the job has ended after step 7, which is saved\n")
    assert job.code == 128 + signal.SIGKILL, job.output
    assert (tmp_path / "checkpoints" / "step-00000007").exists()


@pytest.mark.nightly
def test_the_time_is_nearly_over(tmp_path: Path) -> None:
    job, said = waits(tmp_path, lambda process, _: process.send_signal(signal.SIGUSR1))
    assert said.endswith("the job has ended after step 7, which is saved\n"), said
    assert job.code == EXIT_CODE, job.output


@pytest.mark.parametrize("how", [*nightly("INT", "TERM"), "kill"])
def test_it_ends_at_once(tmp_path: Path, how: str) -> None:
    def end(process: subprocess.Popen[str], job: str) -> None:
        if how == "kill":
            killed = mpitrain("kill", "--hosts", "localhost", job)
            assert killed.stdout == f"job {job}: its launcher on {HERE} was told to end\n", killed.output
        else:
            process.send_signal(signal.Signals[f"SIG{how}"])
        process.wait(HANG_SECONDS)

    job, said = waits(tmp_path, end)
    assert said.endswith("mpitrain: a signal ends the job, which waited for lost hosts\n"), said
    assert job.code == 128 + (signal.SIGINT if how == "INT" else signal.SIGTERM), job.output
    assert not (tmp_path / "checkpoints" / "step-00000007").exists()
    assert row(tmp_path) == [], "something is kept"
