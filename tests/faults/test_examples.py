"""The examples as a user runs them, on the host and on the emulated GPU, and with virtual ranks."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.conftest import need
from faults.failing import nightly
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


@pytest.mark.parametrize("name", ["mlp", *nightly("gpt", "cnn", "images")])
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


@pytest.mark.nightly
def test_images_with_a_backup_worker() -> None:
    """A step is made of the answers that come first: the accuracy is near that of ranks in step, not equal."""
    options = ["--data", "digits", "--device", "host", "--steps", "30", "--backup", "1"]
    job = run_command([PYTHON, "-m", "mpitrain", "run", "-n", "4", "--servers", "1", "examples/images.py", *options])
    succeeded(job)
    assert "3 workers" in job.stdout, job.output
    (accuracy,) = re.findall(r"step 30: test accuracy ([\d.]+)", job.stdout)
    assert abs(float(accuracy) - metric(EXAMPLES["images"], alone("images"))) < 0.2


@pytest.mark.nightly
def test_images_as_a_pipeline() -> None:
    """Each of three ranks has a layer, and the losses are those of one rank that has them all."""
    example = EXAMPLES["images"]
    job = start(3, example, "--stages", "3")
    succeeded(job)
    assert losses(job) == pytest.approx(losses(alone("images")), abs=2e-3)
    assert metric(example, job) == pytest.approx(metric(example, alone("images")), abs=6e-3)


# -- virtual ranks: the same bits on any number of ranks, with any MPI -----------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the digits of scikit-learn, which .venv-openmpi does not have."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        pytest.skip("scikit-learn, which brings the digits, is not installed")
    folder = tmp_path_factory.mktemp("digits")
    data = folder / "sklearn/datasets/data"
    data.mkdir(parents=True)
    (folder / "sklearn/__init__.py").touch()
    shutil.copy(Path(package.origin).parent / "datasets/data/digits.csv.gz", data)
    return folder


ANY = [(vendor, ranks) for vendor in ("mpich", "openmpi") for ranks in (1, 2, 3, 5, 7)]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "runs"), [("mlp", [("mpich", 3), ("mpich", 1)]), ("mlp", ANY), ("gpt", ANY)])
def test_an_example_on_any_ranks(name: str, runs: list[tuple[str, int]], digits: Path) -> None:
    example, digests = EXAMPLES[name], set()
    if example.data and not (default_directory() / example.data).is_dir():
        pytest.skip(f"{example.data} is not there: scripts/get-data {example.data}")
    for vendor, ranks in runs:
        script, *own = example.command
        words = [f"examples/{script}", *own, "--device", "host", "--steps", str(example.steps), "--virtual-ranks", "8"]
        command = [*mpiexec(ranks, vendor), str(VENVS[need(vendor)] / "bin/python"), *words]
        env = {"PYTHONPATH": f"{REPOSITORY}:{digits}"} if vendor == "openmpi" else None
        job = run_command(command, timeout=100, env=env)
        succeeded(job)
        digests |= set(re.findall(r"SHA-256 of all parameters: ([0-9a-f]{64})$", job.stdout, re.M))
    assert len(digests) == 1, digests


# -- with --device cuda: the same results as on the host, for every precision ----------------------------------------

EMULATED = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])}


def on_gpu(ranks: int, *options: str, script: str = "train.py", **env: str) -> Job:
    return run_command([*mpiexec(ranks), PYTHON, f"examples/{script}", *options], timeout=100, env=EMULATED | env)


def first_and_last(job: Job) -> list[float]:
    succeeded(job)
    first, *_, last = re.findall(r" step \d+/\d+ \| loss ([\d.]+) ", job.stdout)  # a slow run prints others in between
    return [float(first), float(last)]


@pytest.mark.parametrize(
    ("model", "precision", "ranks"),
    [
        ("mlp", "fp16", 3),
        *nightly(("mlp", "float32", 1), ("mlp", "bf16", 2), ("cnn", "fp16", 2)),
    ],
)
def test_training_is_as_on_the_host(model: str, precision: str, ranks: int) -> None:
    """The printed losses, first and last, are rounded to 1e-4. Rounding to 16 bits may differ."""
    options = ["--data", "digits", "--model", model, "--precision", precision, "--steps", "6"]
    cuda, host = on_gpu(ranks, *options, "--device", "cuda"), on_gpu(ranks, *options, "--device", "host")
    assert f"ranks: {ranks}, nodes: 1, {model} on cupy, digits" in cuda.stdout
    assert first_and_last(cuda) == pytest.approx(first_and_last(host), abs=2e-4 if precision == "float32" else 5e-3)
    assert (" | loss scale " in cuda.stdout) == (precision == "fp16")


@pytest.mark.nightly
def test_a_gpt_in_bf16() -> None:
    if not (default_directory() / "austen").is_dir():
        pytest.skip("austen is not there: scripts/get-data austen")
    options = ["--steps", "2", "--precision", "bf16", "--context", "16", "--global-batch", "8"]
    cuda, host = (on_gpu(1, *options, "--device", place, script="train_gpt.py") for place in ("cuda", "host"))
    assert "GPT on cupy" in cuda.stdout
    assert first_and_last(cuda) == pytest.approx(first_and_last(host), abs=5e-3)


@pytest.mark.nightly
def test_a_loop_of_ones_own() -> None:
    """The losses are the same on 1 and 2 ranks. If the scale is too large, all ranks skip every step."""
    options = ["--data", "digits", "--steps", "4"]
    alone, two = (on_gpu(ranks, *options, script="gpu_loop.py") for ranks in (1, 2))
    all_skipped = on_gpu(2, *options, "--loss-scale", "1e30", script="gpu_loop.py")
    for job, skipped in ((alone, 0), (two, 0), (all_skipped, 4)):
        succeeded(job)
        assert f"skipped {skipped} of 4 steps" in job.stdout
    one, other, same = (
        [float(loss) for loss in re.findall(r"^step \d/4 \| loss ([\d.]+)$", job.stdout, re.M)]
        for job in (alone, two, all_skipped)
    )
    assert len(one) == 4
    assert one[-1] < one[0]
    assert one == pytest.approx(other, abs=5e-3)
    assert same[0] == pytest.approx(one[0], abs=5e-3)
    assert same[-1] > one[-1]


@pytest.mark.nightly
@pytest.mark.parametrize("num_bytes", ["20000", "400000"], ids=["parameters", "a step"])
def test_a_gpu_that_is_full(num_bytes: str) -> None:
    """Every rank stops. The message has the bytes asked for, the bytes available, and what to change."""
    job = on_gpu(2, "--data", "digits", "--device", "cuda", "--steps", "1", EMULATED_GPU_BYTES=num_bytes)
    failed(job)
    # One rank asked alone, or all asked together, as for buckets.
    alone = r"GPU 0 has no memory left: Out of memory allocating [\d,]+ bytes.* [\d,]+ of its [\d,]+ bytes are free"
    together = r"GPU 0 \(.*\) has no [\d,]+ bytes for .*: [\d,]+ of [\d,]+ are free"
    assert re.search(f"({alone}|{together}).*MPITRAIN_BUCKET_MIB", job.stderr), job.output
