"""Ranks whose environments differ, for example because of a module file or a wrapper script on one machine."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs import mpiexec, run_command

SCRIPT = """
import mpitrain as mt
world = mt.init()
world.barrier()
world.print("all here", all_ranks=True)
"""


def test_threads_set_on_one_rank_only(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    program = [sys.executable, str(script)]
    with_threads = ["env", "OMP_NUM_THREADS=1", *program]
    without = ["env", "-u", "OMP_NUM_THREADS", *program]
    job = run_command([*mpiexec(1), *with_threads, ":", "-n", "1", *without], timeout=30)
    assert job.code == 0, job.output
    assert job.stdout.count("all here") == 2
    assert job.left == []
