"""Run the tests of this folder on all ranks of a job; only rank 0 reports."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

import mpitrain

world = mpitrain.init()
arguments = sys.argv[1:]
if world.rank:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    arguments = [argument for argument in arguments if not argument.startswith("--junit-xml")]
# A folder for each rank: in pytest's usual one the ranks would clear away each other's files.
with tempfile.TemporaryDirectory() as folder:
    options = ["-p", "no:cacheprovider", "--color=no", "-q", f"--basetemp={folder}/base"]
    code = pytest.main([str(Path(__file__).parent), *options, *arguments])
sys.exit(int(code))
