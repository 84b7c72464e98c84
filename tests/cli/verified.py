"""A script that `mpitrain verify` compares, and what it must say of a difference."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from jobs import Job, run_command

# A regression of 50 samples, 11 in a step. A test sets what is to be wrong between BEGIN and the rest.
BEGIN = """
import sys
import numpy
import mpitrain as mt

world = mt.init()
random = numpy.random.default_rng(0)
x, y = random.standard_normal((50, 4)), random.standard_normal(50)

def regression(parameters, batch, on_gradient):
    x, y = batch
    error = x @ parameters["w"] + parameters["b"] - y
    on_gradient("b", 2 * error.sum(keepdims=True) / max(len(x), 1))
    on_gradient("w", 2 * x.T @ error / max(len(x), 1))
    return float((error**2).mean()) if len(x) else 0.0

def make_data(world):
    return mt.data.ArrayData(world, (x, y), global_batch=11)

class Batches:
    # Data of a user's own: `part` says which samples of a batch are this rank's, `weigh` what they weigh.
    epoch, steps_per_epoch, cursor = 0, 5, 0

    def __next__(self):
        begin, self.cursor = self.cursor, self.cursor + 11
        mine = part(begin)
        return (x[mine], y[mine]), weigh(mine)

    def state(self):
        return {"cursor": self.cursor}

    def restore(self, state):
        self.cursor = state["cursor"]

def part(begin):
    return numpy.arange(begin, begin + 11)[world.rank :: world.size]

def weigh(mine):
    return len(mine)
"""


def verify(folder: Path, source: str, *arguments: str, ranks: int = 3, options: tuple[str, ...] = ()) -> Job:
    script = folder / "script.py"
    script.write_text(source)
    command = [sys.executable, "-m", "mpitrain", "verify", "-n", str(ranks), "--hosts", "localhost", *options]
    return run_command([*command, str(script), *arguments])


def differs(job: Job, where: str, *parts: str) -> None:
    """Assert that the output names this place as the first difference, with each of `parts`."""
    assert job.code == 1, job.output
    assert job.left == []
    assert job.stderr == ""
    (found,) = re.findall(r"^verify: first difference: (.*)$", job.stdout, re.M)
    assert found.startswith(where), job.output
    for part in parts:
        assert part in found, found
    assert job.stdout.endswith("script.py: not equal\n")
