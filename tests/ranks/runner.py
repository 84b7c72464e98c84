"""Run the tests of a folder on all ranks of a job; only rank 0 reports."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import mpitrain

# A waiting rank leaves its core for this time, to the other ranks and to the parts beside them: where other processes
# want the core too, sched_yield keeps a rank's share of it.
NAP_SECONDS = 50e-6
# Only tests/ranks on three ranks compile codecs, in a nightly run. That takes a rank about a second of CPU for each
# codec, and gives the same bits as NumPy, which tests/test_compression.py shows.
COMPILES = ("ranks", 3)


def run(folder: Path, arguments: Sequence[str]) -> int:
    """Run the tests. Return this rank's exit code."""
    world = mpitrain.init()
    os.sched_yield = functools.partial(time.sleep, NAP_SECONDS)
    if (folder.name, world.size) != COMPILES or "not nightly" in arguments:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    # To load all plugins of pytest that are installed takes a rank a second of CPU.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if world.rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        arguments = [argument for argument in arguments if not argument.startswith("--junit-xml")]
    # A folder for each rank: in pytest's usual one the ranks would clear away each other's files.
    with tempfile.TemporaryDirectory() as base:
        options = ["-p", "pytest_timeout", "-p", "no:cacheprovider", "--color=no", "-q", f"--basetemp={base}/base"]
        paths = [argument for argument in arguments if argument.startswith("tests/")]
        return int(pytest.main([*([] if paths else [str(folder)]), *options, *arguments]))
