"""No process grows: a recorded job and a dashboard that is looked at, for SOAK_SECONDS (3600 for an hour)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import clean_environment

sys.path.append(str(Path(__file__).parents[1] / "dashboard"))
from serving import dashboard

_SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))
_MOST_GROWTH = 3 << 20  # of a rank, and twice as much of the dashboard; it takes its caches in the first quarter
_PROGRAM = """
import os, sys, time
import numpy
import mpitrain as mt

gradients = {"w": numpy.ones(1000, numpy.float32)}

def function(_, batch, on_gradient):
    time.sleep(0.02)
    on_gradient("w", gradients["w"])
    return 1.0

def build(world):
    open(f"pid-{world.rank}", "w").write(str(os.getpid()))
    data = mt.data.ArrayData(world, numpy.zeros((4096, 1), numpy.float32), global_batch=8)
    return mt.Parts(mt.ArrayFunction(function, {"w": gradients["w"].copy()}, mt.optim.SGD(0.1)), mt.Sync(), data)

evaluate = mt.Evaluation(100, lambda trainer: {"accuracy": 0.5})
kept = [mt.writers.JsonLines("record"), mt.writers.Csv("record"), mt.writers.TensorBoard("record")]
record = mt.Record(kept, steps=2)
mt.Trainer(build, [evaluate, mt.Log(), record, mt.StopAfter(float(sys.argv[1]))]).run()
"""


def memory_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


@pytest.mark.nightly
@pytest.mark.timeout(_SECONDS + 600)
@pytest.mark.skipif(not _SECONDS, reason="takes as long as SOAK_SECONDS says, such as 3600")
def test_no_process_grows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    command = [sys.executable, "-m", "mpitrain", "run", "-n", "4", "train.py", str(_SECONDS + 600)]
    env = clean_environment()
    with (
        (tmp_path / "output").open("w") as output,
        dashboard(tmp_path / "cache", str(tmp_path)) as served,
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=output) as job,
    ):
        try:

            def own(answer: dict[str, Any]) -> list[str]:  # other jobs of this machine are listed too, and may go
                return [run["id"] for run in answer["runs"] if run["rows"] and run["folder"].startswith(str(tmp_path))]

            (run,) = own(served.wait_for("/api/runs", own))
            pids = {f"rank {rank}": int((tmp_path / f"pid-{rank}").read_text()) for rank in range(4)}
            pids |= {"launcher": job.pid, "dashboard": served.process.pid}
            began = time.monotonic()
            first: dict[str, int] = {}
            while (passed := time.monotonic() - began) < _SECONDS:
                served.get("/api/runs")
                served.get(f"/api/runs/{run}")
                served.get(f"/api/runs/{run}/series?name=loss&name=samples_per_second&pixels=800")
                if not first and passed > _SECONDS / 4:
                    first = {name: memory_of(pid) for name, pid in pids.items()}
                time.sleep(0.5)
            grown = {name: memory_of(pid) - first[name] for name, pid in pids.items()}
            print(grown)
            assert all(more <= _MOST_GROWTH * (1 + (name == "dashboard")) for name, more in grown.items()), grown
        finally:
            job.terminate()
