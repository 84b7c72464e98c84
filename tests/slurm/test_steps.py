"""The way to a node of the job: a step of srun, which the launcher and mpiexec use in place of ssh."""

from __future__ import annotations

from pathlib import Path

from slurm_daemons import Slurm
from slurm_programs import PYTHON

# Runs in an allocation of three nodes with two tasks each. What a step prints comes back, and it reads what is sent.
PROGRAM = """
import os, subprocess
from pathlib import Path
from mpitrain.context import JobContext
from mpitrain.launch.connections import command_on
from mpitrain.launch.ssh import marking_ssh
from mpitrain.launch.batch import gpus_of_step

line = "read word; echo $word $SLURMD_NODENAME $SLURM_NTASKS $SLURM_STEP_NUM_TASKS $CUDA_VISIBLE_DEVICES"
done = subprocess.run(command_on("n2", line), input="heard\\n", capture_output=True, text=True)
print(done.returncode, done.stdout.strip(), flush=True)
print(command_on("elsewhere", "true")[0], flush=True)
agent = marking_ssh("n1", Path("agent").absolute(), ["ssh"], JobContext(job="0a1b2c3d"), ["n2", "n3"])
for host in ("n2", "n3"):
    command = [agent, "-x", host, "echo", "$_MPITRAIN_JOB", "$SLURMD_NODENAME"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.returncode, done.stdout.strip(), flush=True)
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
print(gpus_of_step("n2", {"gpus": "1"}), gpus_of_step("n2", {"gpus": "0"}))
print(gpus_of_step("elsewhere", {"gpus": "1"}), gpus_of_step("n2", {"gpus": None}))
"""


def test_a_step_runs_a_line_on_a_node_and_hears_its_stdin(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(PROGRAM)
    asked = ["-N3", "-n6", "--ntasks-per-node=2", "--gpus-per-node=1"]
    job = slurm.run("salloc", "-Q", *asked, PYTHON, "steps.py", cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.stdout.splitlines() == [
        "0 heard n2 1 1 0",  # one task, of the six that the job has
        "ssh",
        "0 0a1b2c3d n2",
        "0 0a1b2c3d n3",
        "{'CUDA_VISIBLE_DEVICES': '1'} {}",
        "{} {}",
    ], job.stderr
    assert job.left == []
