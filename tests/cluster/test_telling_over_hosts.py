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


class ToldJob:
    """The training on nodes of a bed, and what tells it something from any of them."""

    def __init__(self, bed: Bed, options: str) -> None:
        self.bed = bed
        for node in bed.names:
            bed.node_run(node, ["rm", "-f", HOLD, HELD])
        self.job = training(bed, "told.py", SCRIPT, f"--ppn 1 {options} told.py")

    def command(self, node: str, words: str) -> tuple[int, str]:
        """Run `mpitrain` with these words on a node; return the exit code and the output."""
        done = as_user(self.bed, node, f"{PYTHONS['mpich']} -m mpitrain {words} 2>&1")
        return done.returncode, done.stdout

    def tell(self, node: str, words: str) -> str:
        """Tell the only job something from a node, and return the answer."""
        code, answer = self.command(node, f"tell {words}")
        assert code == 0, f"{answer}\n{self.job.output()}"
        return answer

    def applied(self, node: str, words: str) -> int:
        """The same; return the step after which it was applied."""
        answer = self.tell(node, words)
        step = re.search(r"applied after step (\d+)$", answer, re.M)
        assert step is not None, answer
        return int(step[1])

    def go_on(self, node: str, paused: int) -> None:
        """Resume it; no step was made meanwhile. Return when some are made."""
        assert self.applied(node, "resume") == paused
        self.job.wait_for(f"] step {paused + 3} of ")

    def hold(self, node: str) -> None:
        """From now on, the rank of this node waits where it copies its state."""
        self.bed.node_run(node, ["touch", HOLD])

    def wait_held(self, node: str) -> None:
        until(lambda: self.bed.node_run(node, ["ls", HELD]).returncode == 0, "no rank of the node has begun a copy")

    def kill_rank(self, node: str, rank: int) -> None:
        """Kill a rank on its node; the next one does not wait."""
        done = self.bed.node_run(node, ["bash", "-c", f"kill -9 $(cat /tmp/told-rank-{rank}); rm -f {HOLD} {HELD}"])
        assert done.returncode == 0, done.stderr

    def resumed(self, times: int) -> None:
        """Wait until so many tries have gone on from memory."""
        self.job.wait_for("resumed from memory at step ", times)

    def stop(self, node: str) -> list[tuple[int, int, float, float]]:
        """Stop it; return number, number of ranks, learning rate and value of each step. All ranks agree on all."""
        last = self.applied(node, "stop")
        end = self.job.end()
        assert end.code == 0, end.output
        return steps_of(end.output, last)


def steps_of(output: str, last: int) -> list[tuple[int, int, float, float]]:
    """The steps up to `last`. The ranks were never in two states, and no step was made twice or left out."""
    assert "the ranks differ" not in output, output
    found = re.findall(r"\] step (\d+) of (\d+) (\S+) (\S+)\n", output)
    steps = [(int(number), int(size), float(rate), float(value)) for number, size, rate, value in found]
    assert [number for number, *_ in steps] == list(range(1, last + 1)), output
    return steps


def test_a_rank_dies_before_its_host_has_copied_what_it_was_told(bed: Bed) -> None:
    """One host has copied a state with the order, and the other one without: all go on with it.

    The orders come from the launcher's node, and from one that is no host of the job.
    """
    told = ToldJob(bed, "--hosts node1,node2 --restarts 1")
    rate = told.applied("node3", "rate 0.5")
    paused = told.applied("node1", "pause")
    told.hold("node2")
    order = threading.Thread(target=told.command, args=("node3", "tell set decay=0.5"))
    order.start()
    told.wait_held("node2")
    told.kill_rank("node2", 1)
    order.join()
    told.resumed(1)
    told.go_on("node3", paused)
    steps = told.stop("node2")
    assert {row[1:] for row in steps[:rate]} == {(2, 0.01, 0.25)}
    assert {row[1:] for row in steps[rate:paused]} <= {(2, 0.005, 0.25)}
    assert {row[1:] for row in steps[paused:]} == {(2, 0.005, 0.5)}
