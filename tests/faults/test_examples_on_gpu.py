"""The examples with --device cuda, on the emulated GPU: the same results as on the host, for every precision."""

from __future__ import annotations

import os
import re
import sys

import pytest

from faults.outcome import failed, succeeded
from jobs import REPOSITORY, VENVS, Job, mpiexec, run_command

PYTHON = str(VENVS["mpich"] / "bin/python")
EMULATED = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])}

sys.path.insert(0, str(REPOSITORY / "examples"))
from datasets import default_directory  # noqa: E402 (found through the line above)


def start(ranks: int, *options: str, script: str = "train.py", **env: str) -> Job:
    return run_command([*mpiexec(ranks), PYTHON, f"examples/{script}", *options], timeout=100, env=EMULATED | env)


def losses(job: Job) -> list[float]:
    """The first and the last printed loss. A slow run prints others in between."""
    succeeded(job)
    first, *_, last = re.findall(r" step \d+/\d+ \| loss ([\d.]+) ", job.stdout)
    return [float(first), float(last)]


@pytest.mark.parametrize(
    ("model", "precision", "ranks"),
    [
        ("mlp", "float32", 1),
        pytest.param("mlp", "bf16", 2, marks=pytest.mark.nightly),  # the other two are harder
        ("mlp", "fp16", 3),
        ("cnn", "fp16", 2),
    ],
)
def test_training_is_as_on_the_host(model: str, precision: str, ranks: int) -> None:
    """The printed losses, first and last, are rounded to 1e-4. Rounding to 16 bits may differ."""
    options = ["--data", "digits", "--model", model, "--precision", precision, "--steps", "6"]
    cuda, host = start(ranks, *options, "--device", "cuda"), start(ranks, *options, "--device", "host")
    assert f"ranks: {ranks}, nodes: 1, {model} on cupy, digits" in cuda.stdout
    assert losses(cuda) == pytest.approx(losses(host), abs=2e-4 if precision == "float32" else 5e-3)
    assert (" | loss scale " in cuda.stdout) == (precision == "fp16")


def test_a_gpt_in_bf16() -> None:
    if not (default_directory() / "austen").is_dir():
        pytest.skip("austen is not there: scripts/get-data austen")
    options = ["--steps", "2", "--precision", "bf16", "--context", "16", "--global-batch", "8"]
    cuda, host = (start(1, *options, "--device", place, script="train_gpt.py") for place in ("cuda", "host"))
    assert "GPT on cupy" in cuda.stdout
    assert losses(cuda) == pytest.approx(losses(host), abs=5e-3)


def test_a_loop_of_ones_own() -> None:
    """The losses are the same on 1 and 2 ranks. If the scale is too large, all ranks skip every step."""
    options = ["--data", "digits", "--steps", "4"]
    alone, two = (start(ranks, *options, script="gpu_loop.py") for ranks in (1, 2))
    all_skipped = start(2, *options, "--loss-scale", "1e30", script="gpu_loop.py")
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


def test_no_gpu_to_be_had() -> None:
    job = start(2, "--data", "digits", "--device", "cuda", "--steps", "1", EMULATED_GPUS="0")
    failed(job, "rank 0 on ", "CUDA sees no GPU")


@pytest.mark.parametrize("num_bytes", ["20000", "400000"], ids=["parameters", "a step"])
def test_a_gpu_that_is_full(num_bytes: str) -> None:
    """Every rank stops. The message has the bytes asked for, the bytes available, and what to change."""
    job = start(2, "--data", "digits", "--device", "cuda", "--steps", "1", EMULATED_GPU_BYTES=num_bytes)
    failed(job)
    # One rank asked alone, or all asked together, as for buckets.
    alone = r"GPU 0 has no memory left: Out of memory allocating [\d,]+ bytes.* [\d,]+ of its [\d,]+ bytes are free"
    together = r"GPU 0 \(.*\) has no [\d,]+ bytes for .*: [\d,]+ of [\d,]+ are free"
    assert re.search(f"({alone}|{together}).*MPITRAIN_BUCKET_MIB", job.stderr), job.output
