"""The modules that are sent to hosts as text: complete, and in the right order."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import mpitrain
from jobs import HANG_SECONDS, clean_environment
from mpitrain.launch.connections import GUARD
from mpitrain.launch.jobs import ROSTER
from mpitrain.launch.keepers import KEEPER
from mpitrain.launch.reserve import SPARES


@pytest.mark.parametrize("modules", [GUARD, ROSTER, KEEPER, SPARES], ids=lambda modules: modules[-1])
def test_each_module_comes_after_those_that_it_imports(modules: Sequence[str]) -> None:
    for place, module in enumerate(modules):
        assert set(own_imports(module)) <= set(modules[:place]), module


def own_imports(module: str) -> Iterator[str]:
    """The modules of mpitrain that this module imports when it runs. Imports for type checkers alone do not count."""
    tree = ast.parse((Path(mpitrain.__file__).parent / f"{module.replace('.', '/')}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("mpitrain."):
                yield (inner.module or "").removeprefix("mpitrain.")


# Connects to this host with the package as it is, and again when one of the modules has another version.
TWICE = """
import pathlib, sys, time
from mpitrain.launch.connections import connect
from mpitrain.launch.jobs import ROSTER
import mpitrain

for _ in range(2):
    connection = connect("localhost", True, {}, 0.0, ROSTER)
    while not connection.receive(0.0) and not connection.is_closed:
        connection.flush()
        time.sleep(0.05)
    if connection.is_closed:
        sys.exit(connection.why_closed())
    connection.hang_up()
    connection.close(10.0)
    path = pathlib.Path(mpitrain.__file__).parent / "launch" / "roster.py"
    path.write_text("raise SystemExit('another version')\\n" + path.read_text())
"""


def test_an_update_of_the_package_does_not_reach_a_running_process(tmp_path: Path) -> None:
    shutil.copytree(Path(mpitrain.__file__).parent, tmp_path / "mpitrain")
    environment = clean_environment({"PYTHONPATH": str(tmp_path)})
    command = [sys.executable, "-c", TWICE]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "another version" in (tmp_path / "mpitrain/launch/roster.py").read_text()
