"""`mpitrain tell` over the nodes of a cluster: all ranks obey after the same step, also if a rank dies in between."""

from __future__ import annotations

import re
import threading

import pytest
from launching import PYTHONS, as_user, training

from jobs import until
from testbed import Bed

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

# Before each step the ranks compare their states, and after it with what the step was made. Samples are multiples of
# 12, so no sum over 1, 2, 3, 4 or 6 ranks is rounded. While its node has a file HOLD, a rank that copies its state
# waits, and says so by a file HELD.
HOLD, HELD = "/tmp/told-hold", "/tmp/told-held"
SCRIPT = f"""
import os, pathlib, time
import numpy
import mpitrain as mt

decay = mt.tunable("decay", 0.25)
pathlib.Path(f"/tmp/told-rank-{{mt.init().rank}}").write_text(str(os.getpid()))

def adds(parameters, batch, on_gradient):
    x = batch[0]
    on_gradient("w", x.mean(axis=0) + decay.value * parameters["w"] if len(x) else numpy.zeros(5))
    return float(x.mean()) if len(x) else 0.0

class Compares(mt.Hook):
    def state(self):
        while os.path.exists("{HOLD}"):
            pathlib.Path("{HELD}").touch()
            time.sleep(0.02)
        return {{}}

    def restore(self, state):
        pass

    def compare(self, trainer, *mine):
        of_ranks = trainer.world.allgather((*mine, trainer.adapter.parameters()["w"].tobytes().hex()))
        if len(set(of_ranks)) > 1:
            trainer.world.print("the ranks differ:", of_ranks)

    def before_step(self, trainer):
        self.compare(trainer, trainer.step_number, repr(trainer.steering.state()))

    def after_step(self, trainer, step):
        time.sleep(0.05)
        self.compare(trainer, step.learning_rate, decay.value)
        trainer.world.print("step", step.number, "of", trainer.world.size, step.learning_rate, decay.value)
        if step.number == 5:
            trainer.world.print("has begun")

def build(world):
    x = 12.0 * numpy.random.default_rng(0).integers(-9, 9, (60, 5))
    data = mt.data.ArrayData(world, (x,), global_batch=12)
    return mt.Parts(mt.ArrayFunction(adds, {{"w": numpy.zeros(5)}}, mt.optim.SGD(0.01, momentum=0.9)), mt.Sync(), data)

mt.Trainer(build, [mt.StopAtStep(1_000_000), Compares(), mt.Checkpoint("checkpoints", steps=1_000_000)]).run()
"""


def applied(bed: Bed, node: str, words: str) -> int:
    """Tell the only job something from a node. Return the step after which it was applied."""
    done = as_user(bed, node, f"{PYTHONS['mpich']} -m mpitrain tell {words} 2>&1")
    assert done.returncode == 0, done.stdout
    step = re.search(r"applied after step (\d+)$", done.stdout, re.M)
    assert step is not None, done.stdout
    return int(step[1])


def test_a_rank_dies_before_its_host_has_copied_what_it_was_told(bed: Bed) -> None:
    """One host has copied a state with the order, and the other one without: all continue with it.

    The orders come from the launcher's node, and from one that is no host of the job. The ranks were never in two
    states, and no step was made twice or left out.
    """
    for node in ("node1", "node2"):
        bed.node_run(node, ["rm", "-f", HOLD, HELD])
    job = training(bed, "told.py", SCRIPT, "--ppn 1 --hosts node1,node2 --max-restarts 1 told.py")
    rate = applied(bed, "node3", "rate 0.5")
    paused = applied(bed, "node1", "pause")
    bed.node_run("node2", ["touch", HOLD])  # the rank there waits where it copies its state
    order = f"{PYTHONS['mpich']} -m mpitrain tell set decay=0.5"
    thread = threading.Thread(target=as_user, args=(bed, "node3", order))
    thread.start()
    until(lambda: bed.node_run("node2", ["ls", HELD]).returncode == 0, "no rank of the node has begun a copy")
    killed = bed.node_run("node2", ["bash", "-c", f"kill -9 $(cat /tmp/told-rank-1); rm -f {HOLD} {HELD}"])
    assert killed.returncode == 0, killed.stderr
    thread.join()
    job.wait_for("resumed from memory at step ")
    assert applied(bed, "node3", "resume") == paused
    job.wait_for(f"] step {paused + 3} of ")
    last = applied(bed, "node2", "stop")
    end = job.end()
    assert end.code == 0, end.output
    assert "the ranks differ" not in end.output, end.output
    found = re.findall(r"\] step (\d+) of (\d+) (\S+) (\S+)\n", end.output)
    steps = [(int(size), float(rate), float(value)) for _, size, rate, value in found]
    assert [int(number) for number, *_ in found] == list(range(1, last + 1)), end.output
    assert set(steps[:rate]) == {(2, 0.01, 0.25)}
    assert set(steps[rate:paused]) <= {(2, 0.005, 0.25)}
    assert set(steps[paused:]) == {(2, 0.005, 0.5)}
