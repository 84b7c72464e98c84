"""The script that `mpitrain slurm` writes, and SIGUSR1 before anything has started. tests/slurm has a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from programs import program

from jobs import run_command
from mpitrain.cli import main
from mpitrain.cli.slurm import _seconds
from mpitrain.launch.time_limit import BatchJob, batch_script

JOB = BatchJob(
    name="train",
    folder="/home/ada/my runs",
    command=["python", "-m", "mpitrain", "run", "train.py", "--note", "it's new"],
    written_by="mpitrain slurm --nodes 4 train.py",
    nodes=4,
    ranks_per_node=1,
)


def options(job: BatchJob) -> list[str]:
    return [line for line in batch_script(job).splitlines() if line.startswith("#SBATCH")]


def test_what_is_asked_of_slurm() -> None:
    assert options(JOB) == [
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --chdir='/home/ada/my runs'",
        "#SBATCH --output=train-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --requeue",
    ]


def test_all_options() -> None:
    more = replace(JOB, ranks_per_node=8, gpus_per_node=8, cpus_per_task=6, time="1-00:00:00", partition="long")
    more = replace(more, array="0-9%2", warn_seconds=300)
    assert options(more)[2:8] == [
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --partition=long",
        "#SBATCH --array=0-9%2",
    ]
    assert "#SBATCH --output=train-%A_%a.out" in options(more)
    assert "#SBATCH --signal=B:USR1@300" in options(more)
    assert 'mkdir -p "run-$SLURM_ARRAY_TASK_ID" && cd "run-$SLURM_ARRAY_TASK_ID" || exit 1' in batch_script(more)


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, False), (127, False), (138, True), (143, False)])
def test_only_a_saved_training_is_started_again(code: int, is_requeued: bool, tmp_path: Path) -> None:
    """The script itself runs, with a program in place of scontrol that notes how it was called."""
    program(tmp_path / "scontrol", f'echo "$@" > {tmp_path}/called')
    script = batch_script(replace(JOB, command=["sh", "-c", f"exit {code}"]))
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "code": "0"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("requeue 7\n" if is_requeued else "")


def test_signals_reach_the_launcher_and_its_exit_code_counts(tmp_path: Path) -> None:
    told = tmp_path / "told"
    until_told = f"until [ -s {told} ]; do sleep 0.05; done; exit 3"
    child = f"trap 'echo told >> {told}' USR1; touch {tmp_path}/ready; {until_told}"
    script = batch_script(replace(JOB, command=["bash", "-c", child]))
    send = f"( until [ -e {tmp_path}/ready ]; do sleep 0.05; done; kill -USR1 $$ ) &\n"
    line, environ = ["bash", "-c", send + script], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, told.read_text()) == (3, "told\n"), done.stderr


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("0", 0), ("4", 240), ("4:30", 270), ("1:02:03", 3723), ("1-2", 93600), ("1-02:03", 93780), ("1-02:03:04", 93784)],
)
def test_the_times_of_sbatch(time: str, seconds: int) -> None:
    assert _seconds(time) == seconds


def test_a_warning_at_the_start_of_each_try_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm sends the signal up to a minute early: with --time 3 a job could be started again without end."""
    (tmp_path / "train.py").touch()
    command = ["slurm", "--nodes", "1", "--time"]
    for time in ("2", "3", "3:59"):
        assert main([*command, time, str(tmp_path / "train.py")]) == 2
        said = capsys.readouterr().err
        assert f"--time {time} is " in said and "with --warn-seconds 120 it must be at least 240" in said
    for allowed in (["4"], ["0"], ["1-0"], ["3", "--warn-seconds", "60"]):
        assert main([*command, *allowed, str(tmp_path / "train.py")]) == 0


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
