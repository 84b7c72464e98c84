"""`mpitrain run` in a job of Slurm: hosts and ranks come from Slurm. Over nodes: test_run_over_nodes.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from slurm_daemons import NODES, Slurm
from slurm_programs import MPITRAIN, PYTHON, TRAINING, bits, nodes

from jobs import mpiexec
from mpitrain.launch.batch import find_allocation

RUN = [*MPITRAIN, "run"]
HERE = NODES[0]


def test_the_ranks_of_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAINING)
    alone = slurm.run(*mpiexec(3), PYTHON, str(program))
    job = slurm.run("salloc", "-Q", "-N1", "-n3", f"--nodelist={HERE}", *RUN, str(program))
    assert job.code == 0, job.output
    assert nodes(job.stdout) == {0: HERE, 1: HERE, 2: HERE}
    assert bits(job.stdout) == bits(alone.stdout) != {}
    assert job.left == []


def test_more_ranks_than_slurm_has_given_are_refused(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    job = slurm.run("salloc", "-Q", "-N1", "-n2", f"--nodelist={HERE}", *RUN, "-n", "3", str(tmp_path / "train.py"))
    assert job.code == 2, job.output
    assert "mpitrain run: -n 3 is more than Slurm job " in job.stderr
    said = f"has been given: 2 ranks on {HERE}. Ask for more with `sbatch --ntasks=RANKS`, or leave out -n"
    assert said in job.stderr


def test_slurms_own_variables_and_list(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    job = slurm.run("salloc", "-Q", "-N3", "-n5", "env")
    environ = dict(line.split("=", 1) for line in job.stdout.splitlines() if line.startswith("SLURM_") and "=" in line)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    given = find_allocation(environ | {"PATH": os.environ["PATH"]})
    assert given is not None
    assert list(given.slots) == sorted(NODES)
    assert sum(given.slots.values()) == given.most_ranks == 5


@pytest.mark.nightly
def test_gpus_of_the_binding(slurm: Slurm, tmp_path: Path) -> None:
    """srun gives each task one of the node's two GPUs (files, to Slurm), `mpitrain run` both to all ranks."""
    program = "import os\nimport mpitrain as mt\nworld = mt.init()\n"
    (tmp_path / "gpus.py").write_text(f"{program}print('rank', world.rank, os.environ['CUDA_VISIBLE_DEVICES'])")
    asked = ["-N1", "-n2", f"--nodelist={HERE}", "--gpus-per-node=2"]
    job = slurm.run("srun", "--mpi=pmi2", *asked, "--gpus-per-task=1", PYTHON, str(tmp_path / "gpus.py"))
    assert job.code == 0, job.output
    assert sorted(job.stdout.splitlines()) == ["rank 0 0", "rank 1 1"]
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH {' '.join(asked)} --output=out.txt\n{' '.join(RUN)} gpus.py\n")
    assert slurm.wait(slurm.submit(script))["JobState"] == "COMPLETED"
    assert sorted((tmp_path / "out.txt").read_text().splitlines()) == ["[0] rank 0 0,1", "[1] rank 1 0,1"]
