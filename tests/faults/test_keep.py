"""`mt.keep` and `mpitrain.torch.keep`: a killed loop of one's own continues from memory, with the bits of one that is
not killed."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import numpy
import pytest

from faults.failing import DYING, HERE, nightly
from faults.outcome import failed, succeeded
from faults.test_recovery_of_programs import with_torch
from faults.training import resumed
from jobs import REPOSITORY, VENVS, Job, run_command

EVERY = 3  # steps from copy to copy

# A regression with momentum over 3 epochs of 7 batches, the last of one sample. `used` counts how often each sample was
# used, on all ranks together.
SCRIPT = """
import os, pathlib, signal, sys, time
import numpy
import mpitrain as mt

folder = pathlib.Path(sys.argv[1])
"""
SCRIPT += DYING
SCRIPT += """
world = mt.init()
rank = world.rank
random = numpy.random.default_rng(0)
x, y = random.standard_normal((61, 5)), random.standard_normal(61)
batches = [(x[i:i + 10], y[i:i + 10], numpy.arange(61)[i:i + 10]) for i in range(0, 61, 10)] * 3
kept = mt.keep(w=numpy.zeros(5), optimizer={"velocity": numpy.zeros(5), "rate": 0.01}, used=numpy.zeros(61), step=0)
for bx, by, numbers in world.shard(batches, start=kept["step"]):
    step = kept["step"] + 1
    WRONG
    mean = world.mean(2 * bx.T @ (bx @ kept["w"] - by) / max(1, len(bx)), weight=len(bx))
    velocity = 0.9 * kept["optimizer"]["velocity"] + mean
    used = kept["used"] + world.sum(numpy.bincount(numbers, minlength=61))
    optimizer = {"velocity": velocity, "rate": 0.01}
    kept.update(w=kept["w"] - 0.01 * velocity, optimizer=optimizer, used=used, step=step)
if world.is_root:
    numpy.save(folder / "w.npy", kept["w"])
    numpy.save(folder / "used.npy", kept["used"])
"""


def train(
    folder: Path, wrong: str = "pass", ranks: int = 2, vendor: str = "mpich", tries: int = 3, **replaced: str
) -> Job:
    folder.mkdir(exist_ok=True)
    source = SCRIPT.replace("WRONG", wrong)
    for old, new in replaced.items():
        source = source.replace(old, new)
    (folder / "train.py").write_text(source)
    command = [str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "-n", str(ranks)]
    command += ["--max-restarts", str(tries - 1), str(folder / "train.py"), str(folder)]
    return run_command(command, cwd=folder, env={"MPITRAIN_MEMORY_STEPS": str(EVERY)})


def test_a_killed_loop(tmp_path: Path, vendor: str) -> None:
    whole = train(tmp_path / "whole", ranks=3, vendor=vendor)
    succeeded(whole)
    assert not re.search("resumed|memory|failed", whole.output)  # a line about a wait on this machine may be there
    first, second = sorted(random.sample(range(EVERY + 1, 21), 2))
    wrong = f"if (rank, step) in ((2, {first}), (0, {second})) and once(f'killed-{{step}}'): die()"
    job = train(tmp_path / "killed", wrong, ranks=3, vendor=vendor)
    succeeded(job)
    assert resumed(job) == [(step - 1) // EVERY * EVERY for step in (first, second)], job.output
    assert re.search(rf"attempt 1 of 3 failed at step {first}: rank 2 on {HERE} ", job.stderr)
    w, expected = (numpy.load(tmp_path / run / "w.npy").tobytes() for run in ("killed", "whole"))
    assert w == expected
    assert numpy.load(tmp_path / "killed" / "used.npy").tolist() == [3.0] * 61  # each sample once in an epoch


@pytest.mark.nightly
def test_before_the_first_copy(tmp_path: Path) -> None:
    """The loop has nothing to continue from, and a line says so."""
    job = train(tmp_path, "if rank == 1 and step == 2 and once('killed'): die()")
    succeeded(job)
    why = "no host that takes part has a whole copy. The loop begins with what keep() was given"
    assert f"mpitrain: memory is not used: {why}\n" in job.stdout
    assert numpy.load(tmp_path / "used.npy").tolist() == [3.0] * 61


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "keep(w=numpy.zeros(5)",
            "keep(w=numpy.zeros(4 if world.broadcast_object((folder / 'killed').exists()) else 5)",
            "CheckpointError: rank 0 on .*: w is float64 (5,) in the in-memory checkpoint, and was float64 (4,)",
        ),
        (
            "step=0)",
            "step=0, **({'extra': 1} if world.broadcast_object((folder / 'killed').exists()) else {}))",
            "the in-memory checkpoint holds HOLDS; this script keeps HOLDS, extra (value)",
        ),
    ],
)
def test_a_script_that_keeps_something_else(tmp_path: Path, old: str, new: str, said: str) -> None:
    job = train(tmp_path, "if rank == 1 and step == 8 and once('killed'): die()", tries=2, **{old: new})
    words = said.replace("HOLDS", "w (value), optimizer (value), used (value), step (value)")
    failed(job, *words.split(".*: "))


WRONG_USE = {
    "kept.update(v=1)": "update(v=...): this name is not kept; kept are w, optimizer, used, step",
    "kept.update(w=numpy.zeros(6))": "w is float64 (6,) in update(), and was float64 (5,) in keep()",
    "mt.keep(f=lambda: 1)": "f cannot be kept: ",
    "mt.elastic(lambda world: mt.keep(v=1))": "call keep() before mt.elastic",
    "mt.keep(v=1), kept.update(step=1)": "a Trainer or another keep() came after this one",
}


def test_wrong_use(tmp_path: Path) -> None:
    """One process tries all."""
    calls = f"""for call in {list(WRONG_USE)}:
        try:
            eval(call)
        except mt.errors.MpitrainError as error:
            print(str(error).replace("\\n", " "))
    break"""
    (tmp_path / "train.py").write_text(SCRIPT.replace("WRONG", calls))
    job = run_command([str(VENVS["mpich"] / "bin/python"), str(tmp_path / "train.py"), str(tmp_path)], cwd=tmp_path)
    succeeded(job)
    for said, text in zip(job.stdout.splitlines(), WRONG_USE.values(), strict=True):
        assert text in said


@pytest.mark.nightly
def test_a_value_that_cannot_be_copied(tmp_path: Path) -> None:
    """The value ends the job. The copies do not stop quietly."""
    job = train(tmp_path, "kept.update(step=lambda: 1)", tries=2)
    failed(job, "CheckpointError: rank 0 on ", "step cannot be kept: ")
    assert "is not copied" not in job.stderr


@pytest.mark.nightly
def test_sigterm_ends_a_loop_that_saves_nothing(tmp_path: Path) -> None:
    """No other host is left. The loop ends at its next copy, not by the signal."""
    wrong = """if rank == 1 and step == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)"""
    job = train(tmp_path, wrong, **{"* 3\n": "* 3000\n"})
    assert job.code == 128 + signal.SIGTERM, job.output
    ended = re.search(rf"SIGTERM told rank 1 to end on {HERE}: the job has ended after step (\d+)\n", job.stderr)
    assert ended, job.output
    assert f"mpitrain: step {ended[1]} is not saved: in-memory checkpoints end with the job\n" in job.stdout
    assert int(ended[1]) % EVERY == 0


# -- PyTorch ---------------------------------------------------------------------------------------------------------

STEPS = 18  # 3 epochs of 6 batches

# One loop trains two models: one of `prepare` and one in DDP. Dropout draws random numbers, which differ by rank. The
# same loop, without keep(), runs first: it is the undisturbed one.
TORCH = """
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
TORCH += DYING
TORCH += """
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


def train_torch(
    folder: Path, wrong: str, *options: str, tries: int, size: str = "8", after: str = "", vendor: str = "mpich"
) -> Job:
    pytest.importorskip("torch")
    (folder / "train.py").write_text(TORCH.replace("WRONG", wrong).replace("SIZE", size).replace("AFTER", after))
    command = [str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "-n", "2", *options]
    command += ["--max-restarts", str(tries - 1), str(folder / "train.py"), str(folder)]
    packages = with_torch(folder) if vendor == "openmpi" else {}
    return run_command(command, cwd=folder, env={"MPITRAIN_MEMORY_STEPS": "2"} | packages, timeout=300)


@pytest.mark.parametrize(
    ("vendor", "options", "after"),
    # With --recover the job starts again too: a process group has one World.
    [("mpich", [], ""), *nightly(("mpich", [], EXAMPLE), ("openmpi", ["--recover"], ""))],
    ids=["loop", "example", "recover"],
    indirect=["vendor"],
)
def test_a_killed_loop_of_torch(tmp_path: Path, vendor: str, options: list[str], after: str) -> None:
    """The models have the bits of an undisturbed loop, and each sample was used once in each epoch.

    Then the example is killed between two epochs. It continues from where its inner loop has no batch left.
    """
    step = random.randrange(3, STEPS + 1)
    wrong = f"if rank == 1 and step == {step} and once('killed'): die()"
    job = train_torch(tmp_path, wrong, *options, tries=3, after=after, vendor=vendor)
    succeeded(job)
    assert re.search(rf"attempt 1 of 3 failed at step {step}: rank 1 on ", job.stderr)
    assert resumed(job) == [(step - 1) // 2 * 2, *([12] if after else [])], (step, job.output)
    assert job.stdout.count(f"the same bits after {STEPS} steps\n") == 1 + bool(after)
    if after:
        assert re.search(r"attempt 2 of 3.* failed at step 13: rank 1 on ", job.stderr)
        last_try = job.stdout.rpartition("resumed from memory at step 12\n")[2]
        lines = re.findall(r"epoch (\d): loss ([\d.]+), test accuracy", last_try)
        assert [epoch for epoch, _ in lines] == ["1", "2", "3"]
        assert lines[0][1] == (tmp_path / "loss").read_text()


@pytest.mark.nightly
def test_a_model_of_another_shape(tmp_path: Path) -> None:
    size = "(7 if world.broadcast_object((folder / 'killed').exists()) else 8)"
    job = train_torch(tmp_path, "if rank == 1 and step == 8 and once('killed'): die()", tries=2, size=size)
    why = "the in-memory checkpoint does not fit Sequential: Error(s) in loading state_dict"
    failed(job, "CheckpointError: rank 0 on ", why)
