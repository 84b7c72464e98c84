"""The examples for PyTorch end on 2 ranks with the parameters that they end with in one process, to rounding."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import datasets
from jobs import REPOSITORY, Job, mpiexec, run_command

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

# The largest difference of a parameter after three steps, and more arguments. In float32 the sums of two halves of a
# batch differ from that of the whole by some 1e-7 of a gradient; Adam, as in the GPT, divides small ones by their size.
EXAMPLES = {
    "torch_ddp": (1e-6, ()),
    "torch_fsdp2": (1e-6, ()),
    "torch_gpt": (1e-4, ()),
    "torch_images": (1e-5, ("--data", "digits")),
    "accelerate_train": (1e-6, ()),
    "fabric_train": (1e-6, ()),
}
NEEDS = {"accelerate_train": "accelerate", "fabric_train": "lightning_fabric"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_ranks_do_what_one_process_does(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    text = datasets.default_directory() / "austen"
    if name == "torch_gpt" and not text.is_dir():
        pytest.skip(f"no {text}; get it with: scripts/get-data austen")
    tolerance, options = EXAMPLES[name]
    with ThreadPoolExecutor() as pool:  # both at once: most of their time is spent in imports
        jobs = [
            pool.submit(run, start, name, *options, save=tmp_path / f"{start}.pt") for start in ("alone", "2 ranks")
        ]
    alone, together = (job.result().stdout.splitlines()[-1 - (name == "torch_fsdp2")] for job in jobs)
    assert alone.startswith("ranks: 1, step 3: "), alone
    assert together.startswith("ranks: 2, step 3: "), together
    one, two = (torch.load(tmp_path / f"{start}.pt") for start in ("alone", "2 ranks"))
    assert one.keys() == two.keys()
    assert max(float((one[key] - two[key]).abs().max()) for key in one) <= tolerance


def run(start: str, name: str, *options: str, save: Path) -> Job:
    launcher = mpiexec(2) if start == "2 ranks" else []
    command = [sys.executable, f"examples/{name}.py", "--steps", "3", "--save", str(save), *options]
    job = run_command([*launcher, *command], timeout=100.0, cwd=REPOSITORY)
    assert job.code == 0, job.output
    assert not job.left
    return job
