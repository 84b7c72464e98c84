"""The command itself: what it lists, and what it does not load."""

from __future__ import annotations

import re
import sys

import pytest

import mpitrain
from jobs import run_command
from mpitrain.cli import COMMANDS, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"mpitrain {mpitrain.__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^    {name}\s", out, re.M)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["rnu"])
    assert "invalid choice: 'rnu'" in capsys.readouterr().err


def test_the_command_loads_no_array_and_no_mpi_library() -> None:
    heavy = ("numpy", "mpi4py", "cupy", "torch", "jax")
    source = f"import sys, mpitrain.cli; print([name for name in {heavy} if name in sys.modules])"
    job = run_command([sys.executable, "-c", source], timeout=60.0)
    assert job.stdout == "[]\n", job.output
