"""Virtual ranks over nodes: a run that lost a node in the middle has the bits of one rank to which nothing happened."""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path

import pytest
from launching import SHARE, Ended, Job, as_user, run, write

from jobs import REPOSITORY
from testbed import Bed

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("healed")]

EXAMPLE = ("train.py", "arguments.py", "datasets.py", "models/__init__.py", "models/layers.py", "models/mlp.py")

# examples/train.py, which waits from step 15 on until a file is there.
WAITS = """
import pathlib, time
import mpitrain as mt
import train

class Waits(mt.Hook):
    def after_step(self, trainer, step):
        if step.number == 15:
            trainer.world.print("made step 15 on", trainer.world.size, "ranks")
            while trainer.world.is_root and not pathlib.Path("go_on").exists():
                time.sleep(0.05)

mt.Log = Waits
train.main()
"""
OPTIONS = "same_bits/waits.py --data digits --device host --virtual-ranks 8 --steps 40"


@pytest.fixture
def example(bed: Bed) -> None:
    """Write the example to the share, with the digits of scikit-learn, which the nodes do not have."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        pytest.skip("scikit-learn, which brings the digits, is not installed")
    table = (Path(package.origin).parent / "datasets/data/digits.csv.gz").read_bytes()
    folder = f"{SHARE}/same_bits"
    made = as_user(bed, "node1", f"rm -rf go_on {folder}; mkdir -p {folder}/models {folder}/sklearn/datasets/data")
    assert made.returncode == 0, made.stderr
    for name in EXAMPLE:
        write(bed, "node1", f"{folder}/{name}", (REPOSITORY / "examples" / name).read_text())
    write(bed, "node1", f"{folder}/waits.py", WAITS)
    write(bed, "node1", f"{folder}/sklearn/__init__.py", "")
    write(bed, "node1", f"{folder}/digits", base64.encodebytes(table).decode())
    decoded = as_user(bed, "node1", f"base64 -d {folder}/digits > {folder}/sklearn/datasets/data/digits.csv.gz")
    assert decoded.returncode == 0, decoded.stderr


def digest(end: Ended) -> str:
    assert end.code == 0, end.output
    (found,) = re.findall(r"SHA-256 of all parameters: ([0-9a-f]{64})$", end.output, re.M)
    return str(found)


@pytest.mark.nightly
@pytest.mark.usefixtures("example")
def test_a_node_that_loses_its_power(bed: Bed, python: str) -> None:
    setting = "OMP_NUM_THREADS=1 MPITRAIN_MEMORY_STEPS=1"
    job = Job(
        bed, f"--hosts node1,node2,node3 --ppn 1 --restarts 1 --min-nodes 2 {OPTIONS}", python=python, setting=setting
    )
    job.wait_for("made step 15 on 3 ranks")
    bed.kill("node3")
    write(bed, "node1", "go_on", "")
    end = job.end()
    assert "starting again on node1, node2 with 2 ranks, without node3\n" in end.output
    assert re.search(r"resumed from memory at step 1[3-6]\n", end.output), end.output
    assert "kernels may round otherwise" not in end.output
    assert digest(end) == digest(run(bed, f"--hosts node1 -n 1 {OPTIONS}", python=python, setting=setting))
