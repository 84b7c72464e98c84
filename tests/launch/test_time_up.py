"""SIGUSR1 to `mpitrain run` before it has started anything. tests/slurm has the signal at other times."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs import run_command

# Tells itself that its time is up, after the imports and before the ranks.
LAUNCHER = """
import os, signal, sys
from mpitrain.cli import main
from mpitrain.launch import placement

def refuse_crowds(*arguments, first=placement.refuse_crowds):
    os.kill(os.getpid(), signal.SIGUSR1)
    first(*arguments)

placement.refuse_crowds = refuse_crowds
sys.exit(main(["run", "-n", "2", "--hosts", "localhost", *sys.argv[1:]]))
"""
# Ends by itself after a minute.
TRAINING = """
import time
import numpy
import mpitrain as mt

def loss(parameters, batch, on_gradient):
    time.sleep(0.02)
    on_gradient("w", parameters["w"])
    return 1.0

def build(world):
    data = mt.data.ArrayData(world, (numpy.arange(50.0),), global_batch=13)
    return mt.Parts(mt.ArrayFunction(loss, {"w": numpy.ones(7)}, mt.optim.SGD(0.02)), mt.Sync(), data)

mt.Trainer(build, [mt.StopAtStep(3000), mt.Checkpoint("saved", steps=10_000)]).run()
"""


def test_a_signal_before_the_start_ends_the_training_saved(tmp_path: Path) -> None:
    """By its default action it would end the launcher, with the same exit code and nothing saved."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "train.py").write_text(TRAINING)
    job = run_command([sys.executable, "launcher.py", "train.py"], cwd=tmp_path)
    assert job.code == 138, job.output
    assert "the run ends, and is saved, after step" in job.output
    assert list((tmp_path / "saved").glob("step-*"))
    assert job.left == []
