"""Run the tests of this folder on all ranks of a job; only rank 0 reports."""

import sys
from pathlib import Path

from tests.ranks.runner import run

sys.exit(run(Path(__file__).parent, sys.argv[1:]))
