"""Programs for Slurm's jobs, and the commands that run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from slurm_daemons import Slurm

PYTHON = sys.executable
MPITRAIN = [PYTHON, "-m", "mpitrain"]

# Each rank has other data; the sizes of the last batches differ between ranks.
TRAINING = """
import hashlib, os, socket
import numpy
import mpitrain as mt

def loss(parameters, batch, on_gradient):
    x, y = batch
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    random = numpy.random.default_rng(5)
    x = random.standard_normal((50, 7))
    data = mt.data.ArrayData(world, (x, x @ numpy.arange(7.0) + 0.1 * random.standard_normal(50)), global_batch=13)
    return mt.Parts(mt.ArrayFunction(loss, {"w": numpy.zeros(7)}, mt.optim.SGD(0.02)), mt.Sync(), data)

world = mt.init()
print(f"rank {world.rank} of {world.size} on {os.environ.get('SLURMD_NODENAME', socket.gethostname())}", flush=True)
trainer = mt.Trainer(build, [mt.StopAtStep(25)])
trainer.run()
bits = hashlib.sha256(numpy.ascontiguousarray(trainer.adapter.parameters()["w"]).tobytes()).hexdigest()
print(f"bits of rank {world.rank}: {bits}", flush=True)
"""


def bits(output: str) -> dict[int, str]:
    """The hash of the parameters on each rank."""
    return {int(rank): text for rank, text in re.findall(r"bits of rank (\d+): (\w{64})", output)}


def nodes(output: str) -> dict[int, str]:
    """The node of each rank."""
    return {int(rank): node for rank, node in re.findall(r"rank (\d+) of \d+ on (\S+)", output)}


def submitted(slurm: Slurm, folder: Path, *words: str, options: tuple[str, ...] = ()) -> str:
    """Submit `train.py` of the folder by a script of `mpitrain slurm WORDS`, and return the id of the job."""
    written = slurm.run(*MPITRAIN, "slurm", *words, "-o", "job.sh", "train.py", cwd=folder)
    assert written.code == 0, written.output
    return slurm.submit(folder / "job.sh", *options)
