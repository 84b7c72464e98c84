"""Ranks that srun starts: with PMI-2 as one job, without it refused."""

from __future__ import annotations

from pathlib import Path

from slurm_daemons import NODES, Slurm
from slurm_programs import PYTHON, TRAINING, bits, nodes

from jobs import mpiexec


def test_srun_with_pmi2_and_sbatch_and_mpiexec_make_the_same_bits(slurm: Slurm, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAINING)
    alone = slurm.run(*mpiexec(4), PYTHON, str(program))
    assert alone.code == 0, alone.output
    assert len(bits(alone.stdout)) == 4 and len(set(bits(alone.stdout).values())) == 1
    job = slurm.run("srun", "--mpi=pmi2", "-N3", "-n4", PYTHON, str(program))
    assert job.code == 0, job.output
    first, second, third = sorted(NODES)  # Slurm's order
    assert nodes(job.stdout) == {0: first, 1: first, 2: second, 3: third}
    assert bits(job.stdout) == bits(alone.stdout)
    assert job.left == []
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH -N3 -n4 --output=out.txt\nsrun --mpi=pmi2 {PYTHON} {program}\n")
    ended = slurm.wait(slurm.submit(script))
    output = (tmp_path / "out.txt").read_text()
    assert ended["JobState"] == "COMPLETED", output
    assert bits(output) == bits(alone.stdout)


def test_srun_without_mpi_is_refused(slurm: Slurm, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAINING)
    job = slurm.run("srun", "--mpi=none", "-N3", "-n3", PYTHON, str(program))
    assert job.code == 1, job.output
    for rank in range(3):
        assert f"process {rank} on " in job.stderr
    said = "srun started 3 processes (SLURM_STEP_NUM_TASKS=3), but mpi4py loads MPICH, which sees 1"
    assert job.stderr.count(said) == 3, job.output
    assert job.stderr.count("\nor let srun join them, where Slurm has the plugin: --mpi=pmi2\n") == 3
    assert bits(job.stdout) == {}
