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

# With more ranks than cores, a waiting rank leaves its core to the others for this time.
NAP_SECONDS = 50e-6


def run(folder: Path, arguments: Sequence[str]) -> int:
    """Run the tests. Return this rank's exit code."""
    world = mpitrain.init()
    if world.size > len(os.sched_getaffinity(0)):
        os.sched_yield = functools.partial(time.sleep, NAP_SECONDS)
    if world.rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        arguments = [argument for argument in arguments if not argument.startswith("--junit-xml")]
    # A folder for each rank: in pytest's usual one the ranks would clear away each other's files.
    with tempfile.TemporaryDirectory() as base:
        options = ["-p", "no:cacheprovider", "--color=no", "-q", f"--basetemp={base}/base"]
        return int(pytest.main([str(folder), *options, *arguments]))
