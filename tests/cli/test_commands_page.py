"""docs/reference/cli.md: the exit codes and the commands with --json are those of the code."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import REPOSITORY, Job, clean_environment, run_command, until
from mpitrain.cli import COMMANDS

PAGE = (REPOSITORY / "docs/reference/cli.md").read_text()
MPITRAIN = [sys.executable, "-m", "mpitrain"]
EXIT_CODES = dict(re.findall(r"^\| (\d+) \| (.*?) \|", PAGE, re.M))


def run(tmp_path: Path, *arguments: str, script: str = "", number: int = 0) -> Job:
    """Run a command, and send it a signal when the script has begun."""
    (tmp_path / "script.py").write_text(f"import pathlib, sys, time\n{script}\n")

    def send(process: subprocess.Popen[str]) -> None:
        if number:
            until((tmp_path / "begun").exists)
            os.kill(process.pid, number)

    return run_command([*MPITRAIN, *arguments], cwd=tmp_path, during=send)


WAIT = "pathlib.Path('begun').touch(); time.sleep(3600)"
HERE = ("run", "-n", "2", "--hosts", "localhost", "script.py")


@pytest.mark.parametrize(
    ("code", "arguments", "script", "number"),
    [
        (0, HERE, "pass", 0),
        (1, HERE, "import mpitrain\nw = mpitrain.init()\nassert w.rank != 1", 0),
        (1, ("checkpoint", "verify", "."), "", 0),
        (2, ("run", "-n", "2", "nowhere.py"), "", 0),
        (2, ("ps", "--no-such-option"), "", 0),
        (130, HERE, WAIT, signal.SIGINT),
        (143, HERE, WAIT, signal.SIGTERM),
    ],
)
def test_exit_codes(code: int, arguments: tuple[str, ...], script: str, number: int, tmp_path: Path) -> None:
    """The codes of the page that need no cluster; tests of check-cluster have 3."""
    if code == 1 and arguments[0] == "checkpoint":
        (tmp_path / "step-00000001").mkdir()
        (tmp_path / "step-00000001/manifest.json").write_text("{")
    job = run(tmp_path, *arguments, script=script, number=number)
    assert job.code == code, job.output
    assert job.left == []
    assert str(code) in EXIT_CODES


def test_the_reader_of_the_output_has_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*MPITRAIN, "check-cluster", "--explain", "all"],
        stdout=writing,
        timeout=300,
        env=clean_environment(),
        check=False,
    )
    os.close(writing)
    assert done.returncode == 141
    assert "141" in EXIT_CODES


def with_json(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, bool]]:
    """The actions with an option --json, each with whether it takes a file."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from with_json(below, f"{name} {word}")
        if "--json" in action.option_strings:
            yield name, action.nargs != 0


def test_the_table_has_every_command_with_json() -> None:
    described = {
        name
        for row in re.findall(r"^\| (`mpitrain .*?) \|", PAGE.partition("## Output for programs")[2], re.M)
        for name in re.findall(r"`mpitrain ([a-z -]+)`", row)
    }
    printed = set()
    for name, module in COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        printed |= {path for path, takes_file in with_json(parser, name) if not takes_file}
    assert printed == described


@pytest.mark.parametrize(
    ("arguments", "keys", "codes"),
    [
        # The jobs of other tests may have problems.
        (["ps", "--hosts", "localhost"], {"hosts", "jobs", "kept", "problems"}, (0, 1)),
        (["ps", "--hosts", "localhost", "00000000"], {"hosts", "jobs", "kept", "problems"}, (1,)),
        (["top", "00000000"], {"jobs", "problems"}, (1,)),
        (["check-cluster", "--explain", "all"], {"checks"}, (0,)),
        (["check-cluster", "--explain", "SSH01"], {"checks"}, (0,)),
    ],
)
def test_one_object_and_nothing_else(
    arguments: list[str], keys: set[str], codes: tuple[int, ...], tmp_path: Path
) -> None:
    job = run(tmp_path, arguments[0], "--json", *arguments[1:])
    assert job.code in codes, job.output
    content = json.loads(job.stdout)
    assert content.keys() == keys
    if "checks" in keys:
        ids = [check["id"] for check in content["checks"]]
        assert ids == ["SSH01"] or (len(ids) > 50 and len(set(ids)) == len(ids))


def test_a_running_job(tmp_path: Path) -> None:
    """ps has its ranks, steps and script; tell what it can be told."""
    name = f"script-{secrets.token_hex(4)}.py"
    script = "import mpitrain\nw = mpitrain.init()\nw.barrier()\n" + WAIT
    (tmp_path / name).write_text(f"import pathlib, time\n{script}\n")
    seen: list[Job] = []

    def look(process: subprocess.Popen[str]) -> None:
        until((tmp_path / "begun").exists)
        seen.append(run_command([*MPITRAIN, "ps", "--hosts", "localhost", "--json"], cwd=tmp_path))
        os.kill(process.pid, signal.SIGINT)

    run_command([*MPITRAIN, *HERE[:-1], name], cwd=tmp_path, during=look)
    jobs = [job for job in json.loads(seen[0].stdout)["jobs"] if name in job["script"]]
    (ranks,) = [job["ranks"] for job in jobs if job["state"] in ("runs", "starts")] or [{}]
    assert [*ranks.values()] == [[0, 1]], seen[0].output


def test_checkpoints(tmp_path: Path) -> None:
    assert run_command([*MPITRAIN, "new", str(tmp_path / "project")]).code == 0
    steps = "NUM_EPOCHS, STEPS_PER_EPOCH = 1, 5\n    hooks = ["
    text = (tmp_path / "project/train.py").read_text().replace("hooks = [", steps, 1)
    (tmp_path / "project/train.py").write_text(text)
    job = run_command([sys.executable, "train.py"], cwd=tmp_path / "project")
    assert job.code == 0, job.output
    listed, shown, verified = (
        json.loads(
            run_command([*MPITRAIN, "checkpoint", word, "--json", "checkpoints"], cwd=tmp_path / "project").stdout
        )
        for word in ("ls", "show", "verify")
    )
    (one,) = listed["checkpoints"]
    assert (one["step"], one["ranks"], listed["damaged"]) == (5, 1, [])
    shapes = {name: tensor["shape"] for name, tensor in shown["tensors"].items()}
    assert [8, 64] in shapes.values() and shown["step"] == 5
    assert verified["whole"] == [one["path"]] and verified["damaged"] == []
