"""The examples as a user runs them, and what init() does to threads and to multiprocessing."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.outcome import failed, succeeded
from jobs import REPOSITORY, VENVS, Job, mpiexec, run_command

PYTHON = str(VENVS["mpich"] / "bin/python")

sys.path.insert(0, str(REPOSITORY / "examples"))
from datasets import default_directory  # noqa: E402 (found through the line above)


@dataclass(frozen=True)
class Example:
    """A short run of an example, and what its last evaluation must reach."""

    command: tuple[str, ...]
    steps: int
    metric: str
    lowest: float
    highest: float
    data: str | None = None  # the data set that scripts/get-data must have fetched


EXAMPLES = {
    "mlp": Example(("train.py", "--data", "digits"), 30, "test accuracy", 0.9, 1.0),
    "cnn": Example(("train.py", "--data", "digits", "--model", "cnn"), 30, "test accuracy", 0.9, 1.0),
    "images": Example(("images.py", "--data", "digits"), 30, "test accuracy", 0.6, 0.9),
    # ln 81 = 4.39 is the loss of an untrained model.
    "gpt": Example(("train_gpt.py", "--context", "16"), 4, "validation loss", 3.0, 4.0, data="austen"),
}


def start(
    ranks: int, example: Example, *options: str, steps: int | None = None, env: Mapping[str, str] | None = None
) -> Job:
    script, *own = example.command
    command = [PYTHON, f"examples/{script}", *own, "--device", "host", "--steps", str(steps or example.steps)]
    return run_command([*mpiexec(ranks), *command, *options], timeout=100, env=env)


@functools.cache
def alone(name: str) -> Job:
    """A whole run of an example on one rank."""
    job = start(1, EXAMPLES[name])
    succeeded(job)
    return job


def metric(example: Example, job: Job) -> float:
    """The last evaluation that the job printed."""
    found = re.findall(rf"^step {example.steps}: {example.metric} ([\d.]+)$", job.stdout, re.M)
    assert len(found) == 1, job.output
    return float(found[0])


def losses(job: Job) -> dict[int, float]:
    """The losses that the job printed of its first and last step. Which others it prints depends on the load."""
    found = re.findall(r" step (\d+)/(\d+) \| loss ([\d.]+) ", job.stdout)
    return {int(step): float(loss) for step, last, loss in found if step in ("1", last)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str) -> None:
    example = EXAMPLES[name]
    if example.data and not (default_directory() / example.data).is_dir():
        pytest.skip(f"{example.data} is not there: scripts/get-data {example.data}")
    one, three = alone(name), start(3, example)
    succeeded(three)
    for job in (one, three):
        assert job.stderr == "", job.output
        assert example.lowest <= metric(example, job) <= example.highest, job.output
    assert ("ranks: 3, nodes: 1" in three.stdout) == (name != "images")  # which prints the same on any ranks
    # The steps have the same samples: losses are equal except for the rounding of float32 and of the printed digits.
    assert losses(one).keys() == losses(three).keys() == {1, example.steps}
    assert losses(three) == pytest.approx(losses(one), abs=2e-3)
    assert metric(example, three) == pytest.approx(metric(example, one), abs=6e-3)  # two of 355 images


def test_images_with_a_backup_worker() -> None:
    """A step is made of the answers that come first: the accuracy is near that of ranks in step, not equal."""
    options = ["--data", "digits", "--device", "host", "--steps", "30", "--backup", "1"]
    job = run_command([PYTHON, "-m", "mpitrain", "run", "-n", "4", "--servers", "1", "examples/images.py", *options])
    succeeded(job)
    assert "3 workers" in job.stdout, job.output
    (accuracy,) = re.findall(r"step 30: test accuracy ([\d.]+)", job.stdout)
    assert abs(float(accuracy) - metric(EXAMPLES["images"], alone("images"))) < 0.2


def test_images_as_a_pipeline() -> None:
    """Each of three ranks has a layer, and the losses are those of one rank that has them all."""
    example = EXAMPLES["images"]
    job = start(3, example, "--stages", "3")
    succeeded(job)
    assert losses(job) == pytest.approx(losses(alone("images")), abs=2e-3)
    assert metric(example, job) == pytest.approx(metric(example, alone("images")), abs=6e-3)


def test_the_setting_for_compression() -> None:
    """On one node nothing is sent: the result is the same, and a line says so."""
    example = EXAMPLES["mlp"]
    plain, short = (start(2, example, steps=4, env=env) for env in ({}, {"MPITRAIN_COMPRESSION": "int8"}))
    for job in (plain, short):
        succeeded(job)
    assert losses(short) == losses(plain)
    line = "mpitrain: compression int8: all ranks are on one node, so nothing is compressed\n"
    assert [job.stdout.count(line) for job in (plain, short)] == [0, 1]


def test_a_run_in_two_parts_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    example = EXAMPLES["mlp"]
    first = start(3, example, "--checkpoints", str(tmp_path), steps=12)
    succeeded(first)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000012"]
    second, whole = start(2, example, "--checkpoints", str(tmp_path)), alone("mlp")
    succeeded(second)
    assert f"resumed from {tmp_path}/step-00000012 at step 12\n" in second.stdout
    assert losses(second)[30] == pytest.approx(losses(whole)[30], abs=2e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-000000{step}" for step in (12, 24, 30)]


# -- threads ---------------------------------------------------------------------------------------------------------
THREADS = """
import json, sys
import numpy, threadpoolctl
import mpitrain as mt

def threads():
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

before = threads()
world = mt.init()
world.print(json.dumps([before, world.allgather(threads())]))
"""


def blas_threads(ranks: int, folder: Path, settings: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Threads of each BLAS before init(), and after it on each rank. Only the variables in `settings` are set."""
    (folder / "script.py").write_text(THREADS)
    unset = [
        "env",
        *(option for name in ("OMP", "OPENBLAS", "MKL", "BLIS") for option in ("-u", f"{name}_NUM_THREADS")),
    ]
    job = run_command([*unset, *settings, *mpiexec(ranks), PYTHON, str(folder / "script.py")])
    succeeded(job)
    before, after = json.loads(job.stdout)
    if not before:
        pytest.skip("threadpoolctl does not know this NumPy's BLAS")
    return before, after


def cores() -> int:
    return len(os.sched_getaffinity(0))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_cores(ranks: int, tmp_path: Path) -> None:
    before, after = blas_threads(ranks, tmp_path, [])
    share = max(1, cores() // ranks)
    assert after == [[min(share, found) for found in before]] * ranks


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_threads_that_the_user_has_set_stay(variable: str, tmp_path: Path) -> None:
    if cores() < 2:
        pytest.skip("needs two cores")
    before, after = blas_threads(2, tmp_path, [f"{variable}=2"])
    assert after == [before, before]


def test_one_rank_alone_keeps_all_threads(tmp_path: Path) -> None:
    before, after = blas_threads(1, tmp_path, [])
    assert after == [before]


# -- multiprocessing -------------------------------------------------------------------------------------------------
POOL = """
import multiprocessing, os
import mpitrain as mt

def square(number):
    return number**2, os.getpid()

if __name__ == "__main__":
    world = mt.init()
    with multiprocessing.Pool(2) as pool:
        results = pool.map(square, range(10 * world.rank, 10 * world.rank + 5))
    assert os.getpid() not in {pid for _, pid in results}
    total = world.sum(sum(number for number, _ in results))
    world.print(multiprocessing.get_start_method(), total)
"""


def test_a_pool_of_processes_in_every_rank(tmp_path: Path, vendor: str) -> None:
    (tmp_path / "script.py").write_text(POOL)
    job = run_command([*mpiexec(2, vendor), str(VENVS[vendor] / "bin/python"), str(tmp_path / "script.py")])
    succeeded(job)
    assert job.stdout == f"fork {sum(n**2 for n in [*range(5), *range(10, 15)])}\n"
    assert job.stderr == "", job.output


def test_a_start_method_that_the_user_has_chosen_stays(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        POOL.replace("world = mt", "multiprocessing.set_start_method('spawn')\n    world = mt")
    )
    job = run_command([*mpiexec(2), PYTHON, str(tmp_path / "script.py")])
    succeeded(job)
    assert job.stdout.startswith("spawn "), job.output


def test_an_exception_in_a_process_of_a_pool_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(POOL.replace("return number**2", "return 1 // (number - 12)"))
    job = run_command([*mpiexec(2), PYTHON, str(tmp_path / "script.py")])
    # (multiprocessing's own helper, which removes what the pool held, may print after the report.)
    failed(job, "mpitrain: rank 1 on ", " failed:\n", "ZeroDivisionError: ")
