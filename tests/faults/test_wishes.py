"""Wishes to change the hosts of a job on one machine: an impossible wish is refused at once."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from faults.outcome import succeeded
from jobs import VENVS, run_command, until
from mpitrain.launch.control import ask
from mpitrain.launch.roster import launcher_name

HERE = socket.gethostname()

# Each part lasts until its file exists.
SCRIPT = """
import pathlib, sys, time
import numpy
import mpitrain as mt

folder = pathlib.Path(sys.argv[1])
world = mt.init()

def is_over(part):
    time.sleep(0.02)
    return world.broadcast_object((folder / part).exists())

def loss(parameters, batch, on_gradient):
    on_gradient("w", numpy.ones(2))
    return 1.0

def build(world):
    data = mt.data.ArrayData(world, (numpy.ones(4),), global_batch=2)
    return mt.Parts(mt.ArrayFunction(loss, {"w": numpy.zeros(2)}, mt.optim.SGD(0.1)), mt.Sync(), data)

class Until(mt.Hook):
    ends_run = True

    def __init__(self, part):
        self.part = part

    def after_step(self, trainer, step):
        if is_over(self.part):
            trainer.last_step = step.number

def part(name):
    world.print("begins", name)

def run(name):
    part(name)
    if name == KEPT:
        kept = mt.keep(step=0)
        while not is_over(name):
            kept.update(step=kept["step"] + 1)
    else:
        mt.Trainer(build, [Until(name)]).run()

part("loop")
while not is_over("loop"):
    pass
run("first")
run("second")
part("rest")
while not is_over("rest"):
    pass
"""


@pytest.mark.parametrize("kept", ["none", "first"])
def test_only_the_first_run_can_be_left(tmp_path: Path, kept: str) -> None:
    """A run is that of a Trainer, or a loop with mt.keep."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("KEPT", repr(kept)))
    none = "a loop with mt.keep, copies its state to memory, and none does so now"
    alone = "no host would be left, and --min-nodes is 1"
    refused = {"loop": none, "first": alone, "second": "it is in run 2 of its script, and the hosts", "rest": none}

    def during(process: subprocess.Popen[str]) -> None:
        for part, why in refused.items():

            def is_refused(why: str = why) -> bool:
                told = ask(launcher_name(process.pid), {"leave": [HERE]})
                return why in told.get("refused", "")

            until(is_refused, part)
            (tmp_path / part).touch()

    command = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain", "run", "-n", "2", "--restarts", "1"]
    job = run_command([*command, str(tmp_path / "train.py"), str(tmp_path)], cwd=tmp_path, during=during)
    succeeded(job)
    assert "could change" not in job.stderr
