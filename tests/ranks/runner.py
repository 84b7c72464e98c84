"""Run the tests of a folder on all ranks of a job; only rank 0 reports."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import mpitrain


def run(folder: Path, arguments: Sequence[str]) -> int:
    """This rank's exit code."""
    if mpitrain.init().rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        arguments = [argument for argument in arguments if not argument.startswith("--junit-xml")]
    # A folder for each rank: in pytest's usual one the ranks would clear away each other's files.
    with tempfile.TemporaryDirectory() as base:
        options = ["-p", "no:cacheprovider", "--color=no", "-q", f"--basetemp={base}/base"]
        return int(pytest.main([str(folder), *options, *arguments]))
