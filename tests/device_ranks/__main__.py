"""Run the tests of this folder on all ranks of a job: on its GPUs, or with `--emulated=N` first on N emulated ones."""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

arguments = sys.argv[1:]
if arguments and arguments[0].startswith("--emulated"):
    os.environ["EMULATED_GPUS"] = arguments[0].partition("=")[2] or "1"
    os.environ["EMULATED_NCCL"] = "1"  # not possible where ranks share a GPU
    emulation = str(Path(__file__).parents[1] / "emulated")
    sys.path.insert(0, emulation)
    # These variables are for the processes that a rank starts.
    os.environ["PYTHONPATH"] = f"{emulation}:{os.environ.get('PYTHONPATH', '')}"
    # A finding about an MPI library with an emulated GPU says nothing about a real GPU.
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mpitrain-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    arguments = arguments[1:]

from tests.ranks.runner import run  # noqa: E402 - it loads mpitrain

sys.exit(run(Path(__file__).parent, arguments))
