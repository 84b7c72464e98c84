"""`mpitrain.torch.keep`: a killed loop goes on from memory, with `prepare`, with DDP, and in the example."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from faults.conftest import need
from faults.dying import DYING
from faults.outcome import failed, succeeded
from faults.test_recovery_of_programs import OF_TORCH
from jobs import REPOSITORY, VENVS, Job, run_command

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

EVERY = 2  # steps from copy to copy
STEPS = 18  # 3 epochs of 6 batches

# One loop trains two models: one of `prepare` and one in DDP. Dropout draws random numbers, which differ by rank. The
# same loop, without keep(), runs first: it is the undisturbed one.
SCRIPT = """
import os, pathlib, random, signal, sys
import numpy, torch
import torch.distributed as dist
import mpitrain as mt
import mpitrain.torch
from torch.nn.parallel import DistributedDataParallel

folder = pathlib.Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("mpitrain")
world = mt.init()
rank = world.rank
"""
SCRIPT += DYING
SCRIPT += """
def model():
    made = torch.nn.Linear(4, SIZE), torch.nn.BatchNorm1d(SIZE), torch.nn.Dropout(), torch.nn.Linear(SIZE, 1)
    return torch.nn.Sequential(*made)

def train(keeps):
    torch.manual_seed(3)
    x = torch.randn(36, 4)
    set = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(36))
    loader = torch.utils.data.DataLoader(set, batch_size=6, shuffle=True, generator=torch.Generator())
    models = [model(), model()]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 4) for one in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    models[0], _, data = mpitrain.torch.prepare(models[0], optimizers[0], loader)
    models[1] = DistributedDataParallel(models[1])
    for seed in torch.manual_seed, numpy.random.seed, random.seed:
        seed(rank)
    used, drawn = torch.zeros(36, dtype=torch.int64), []
    if keeps:
        kept = mpitrain.torch.keep(*models, *optimizers, *schedulers, scaler, data, used=used, drawn=drawn, step=0)
        used, drawn = kept["used"], kept["drawn"]
    step = kept["step"] if keeps else 0
    for epoch in range(data.epoch, 3):
        for inputs, targets, numbers in data:
            step += 1
            if keeps:
                WRONG
            for one, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(one(inputs), targets)
                (scaler.scale(loss) if one is models[0] else loss).backward()
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[1].step()
            for scheduler in schedulers:
                scheduler.step()
            for of_rank in world.allgather(numbers):
                used[of_rank] += 1
            drawn = drawn + world.allgather((numpy.random.random(), random.random()))
            if keeps:
                kept.update(drawn=drawn, step=step)
    tensors = [tensor.numpy().tobytes() for one in models for tensor in one.state_dict().values()]
    return tensors, used.tolist(), drawn, scaler.get_scale(), epoch, step

undisturbed, result = train(False), train(True)
assert result == undisturbed, (result, undisturbed)
assert result[1] == [3] * 36
world.print("the same bits after", result[-1], "steps")
AFTER
"""

# The example has 12 batches an epoch, so its newest copy is that of an epoch's last batch.
EXAMPLE = """
import runpy
from mpitrain.state.keep import KeptState

update = KeptState.update

def dying(kept, **values):
    if rank == 1 and kept.step_number == 12 and once("killed in the example"):
        (folder / "loss").write_text(f"{kept['loss']:.5f}")
        die()
    update(kept, **values)

KeptState.update = dying
sys.path.insert(0, "REPOSITORY/examples")
sys.argv[1:] = []
runpy.run_path("REPOSITORY/examples/torch_whole_loop.py", run_name="__main__")
""".replace("REPOSITORY", str(REPOSITORY))


def train(folder: Path, wrong: str, tries: int, size: str = "8", after: str = "") -> Job:
    (folder / "train.py").write_text(SCRIPT.replace("WRONG", wrong).replace("SIZE", size).replace("AFTER", after))
    command = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain", "run", "-n", "2"]
    command += ["--restarts", str(tries - 1), str(folder / "train.py"), str(folder)]
    return run_command(command, cwd=folder, env={"MPITRAIN_MEMORY_STEPS": str(EVERY)}, timeout=300)


def test_a_killed_loop(tmp_path: Path) -> None:
    """The models have the bits of an undisturbed loop, and each sample was used once in each epoch.

    Then the example is killed between two epochs. It goes on from where its inner loop has no batch left.
    """
    step = random.randrange(EVERY + 1, STEPS + 1)
    job = train(tmp_path, f"if rank == 1 and step == {step} and once('killed'): die()", tries=3, after=EXAMPLE)
    succeeded(job)
    assert re.search(rf"try 1 of 3 failed at step {step}: rank 1 on ", job.stderr)
    assert re.search(r"try 2 of 3.* failed at step 13: rank 1 on ", job.stderr)
    resumed = re.findall(r"resumed from memory at step (\d+)$", job.stdout, re.M)
    assert [int(found) for found in resumed] == [(step - 1) // EVERY * EVERY, 12], (step, job.output)
    assert job.stdout.count(f"the same bits after {STEPS} steps\n") == 2
    last_try = job.stdout.rpartition("resumed from memory at step 12\n")[2]
    lines = re.findall(r"epoch (\d): loss ([\d.]+), test accuracy", last_try)
    assert [epoch for epoch, _ in lines] == ["1", "2", "3"]
    assert lines[0][1] == (tmp_path / "loss").read_text()


@pytest.mark.nightly
def test_a_model_of_another_shape(tmp_path: Path) -> None:
    size = "(7 if world.broadcast_object((folder / 'killed').exists()) else 8)"
    job = train(tmp_path, "if rank == 1 and step == 8 and once('killed'): die()", tries=2, size=size)
    failed(
        job, "CheckpointError: rank 0 on ", "the copy in memory does not fit Sequential: Error(s) in loading state_dict"
    )


# Runs the recipe of docs/how-to/pytorch.md as it is printed. Rank 1 is killed in an update, once in each epoch.
KILLING = """
import os, pathlib, runpy, signal, sys
import mpitrain as mt
from mpitrain.state.keep import KeptState

folder, update = pathlib.Path(sys.argv[1]), KeptState.update
"""
KILLING += DYING
KILLING += """
def dying(kept, **values):
    if mt.init().rank == 1 and kept.step_number in (20, 100) and once(f"killed at {kept.step_number}"):
        die()
    update(kept, **values)

KeptState.update = dying
runpy.run_path("ddp.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("vendor", "recover"),
    [
        pytest.param("mpich", [], marks=pytest.mark.nightly),  # test_a_killed_loop and test_docs.py have its parts
        pytest.param("openmpi", [], marks=pytest.mark.nightly),
        pytest.param("openmpi", ["--recover"], marks=pytest.mark.nightly),
    ],
    ids=["mpich", "openmpi", "recover"],
)
def test_the_recipe_for_ddp(tmp_path: Path, vendor: str, recover: list[str]) -> None:
    """It prints what the document prints. With --recover the job starts again too: a process group has one World."""
    text = (REPOSITORY / "docs/how-to/pytorch.md").read_text().partition("<!-- test: file=ddp.py -->\n```python\n")[2]
    recipe, _, after = text.partition("```")
    printed = re.findall(r"^\[0\] epoch .*$", after.partition("$ mpitrain run -n 2 --restarts 5 ddp.py\n")[2], re.M)[:2]
    (tmp_path / "ddp.py").write_text(recipe)
    (tmp_path / "killing.py").write_text(KILLING)
    (tmp_path / "packages").mkdir()  # .venv-openmpi has no PyTorch
    for name in OF_TORCH if vendor == "openmpi" else []:
        (tmp_path / "packages" / name).symlink_to(Path(torch.__file__).parents[1] / name)
    env = {"PYTHONPATH": f"{REPOSITORY}:{tmp_path / 'packages'}"}
    command = [str(VENVS[need(vendor)] / "bin/python"), "-m", "mpitrain", "run", "-n", "2", *recover]
    command += ["--restarts", "5", "killing.py", "."]
    job = run_command(command, cwd=tmp_path, env=env, timeout=120)
    succeeded(job)
    assert len(re.findall(r"try \d of 6.* failed at step (?:21|101): rank 1 on .*; starting again", job.stderr)) == 2
    assert job.stdout.count("resumed from memory at step ") == 2
    lines = re.findall(r"^\[0\] epoch .*$", job.stdout, re.M)
    assert list(dict.fromkeys(lines)) == printed  # a line is there twice if the newest copy was older than it
    assert len(printed) == 2
