"""docs/reference/cli.md: the exit codes and the commands with --json are those of the code."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jobs import REPOSITORY, clean_environment
from mpitrain.cli import COMMANDS, main

PAGE = (REPOSITORY / "docs/reference/cli.md").read_text()


def test_exit_codes() -> None:
    """The tests of commands have each of them: 130 and 143 test_run.py, 138 tests/faults, 3 test_check_cluster.py."""
    assert set(re.findall(r"^\| (\d+) \| ", PAGE, re.M)) == {"0", "1", "2", "3", "130", "138", "141", "143"}


def test_the_reader_of_the_output_has_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mpitrain", "check-cluster", "--explain", "all"]
    done = subprocess.run(command, stdout=writing, timeout=300, env=clean_environment(), check=False)
    os.close(writing)
    assert done.returncode == 141


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
    arguments: list[str], keys: set[str], codes: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([arguments[0], "--json", *arguments[1:]]) in codes
    content = json.loads(capsys.readouterr().out)
    assert content.keys() == keys
    if "checks" in keys:
        ids = [check["id"] for check in content["checks"]]
        assert ids == ["SSH01"] or (len(ids) > 50 and len(set(ids)) == len(ids))
