"""Run the tests of this folder on all ranks of a job; only rank 0 reports."""

import os
import sys
from pathlib import Path

import pytest

import mpitrain

world = mpitrain.init()
arguments = sys.argv[1:]
if world.rank:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    arguments = [argument for argument in arguments if not argument.startswith("--junit-xml")]
code = pytest.main([str(Path(__file__).parent), "-p", "no:cacheprovider", "--color=no", "-q", *arguments])
sys.exit(int(code))
