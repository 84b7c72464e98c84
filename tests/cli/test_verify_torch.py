"""`mpitrain verify` of programs in PyTorch and JAX: what it sees, that it ends them, and what it says at once."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from jobs import Job, run_command

# A regression of 60 samples, 12 in a step, whose loop has no end. What a test wants it puts in between.
TORCH = """
import itertools
import torch
import torch.distributed as dist
import mpitrain as mt
import mpitrain.torch

torch.manual_seed(0)
x, y = torch.randn(60, 4), torch.randn(60, 1)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = torch.utils.data.TensorDataset(x, y)

def train(model, batches):
    for epoch in itertools.count():
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        evaluate(batches)

def evaluate(batches):
    for x, y in batches:
        with torch.no_grad():  # behind the loader: only the model's call tells that this batch is no sample
            model(x)
"""
PREPARE = """
loader = torch.utils.data.DataLoader(data, 11, shuffle=True)
model, optimizer, loader = mpitrain.torch.prepare(model, optimizer, loader)
train(model, loader)
"""
IN_ROUNDS = """
loader = torch.utils.data.DataLoader(data, 11, shuffle=True)
other = torch.nn.Linear(4, 1)
its = torch.optim.SGD(other.parameters(), lr=0.05)
_, _, loader = mpitrain.torch.prepare(other, its, loader, strategy=mt.LocalSGD(3))
"""
LOOP = "train(model, loader)\n"
GROUP = """
dist.init_process_group("mpitrain")
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, 12 // dist.get_world_size(), sampler=sampler)
"""
DDP = GROUP + "train(torch.nn.parallel.DistributedDataParallel(model), loader)\n"
JAX = """
import itertools
import jax
import jax.numpy as jnp
import numpy
import mpitrain.jax

random = numpy.random.default_rng(0)
x, y = random.standard_normal((50, 4)).astype("float32"), random.standard_normal(50).astype("float32")

def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)

def step(w, x, y):
    value, gradient = mpitrain.jax.mean(jax.value_and_grad(loss), weight=lambda w, x, y: len(x))(w, x, y)
    return w - 0.05 * gradient

step = jax.jit(step)
w = mpitrain.jax.broadcast(jnp.zeros(4))
batches = [(x[begin : begin + 11], y[begin : begin + 11]) for begin in range(0, 44, 11)]
for epoch in itertools.count():
    for x_part, y_part in mpitrain.jax.shard(batches):
        w = step(w, x_part, y_part)
"""


def verify(folder: Path, source: str, steps: int = 7) -> Job:
    library = "jax" if "import jax" in source else "torch"
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script = folder / "script.py"
    script.write_text(source)
    command = [sys.executable, "-m", "mpitrain", "verify", "-n", "2", "--hosts", "localhost", "--steps", str(steps)]
    return run_command([*command, str(script)], timeout=100)


def lines_of(job: Job) -> list[str]:
    return re.findall(r"^verify: (.*)$", job.stdout, re.M)


def test_a_loop_over_prepare(tmp_path: Path) -> None:
    """5 batches of 11 and one of 5, an evaluation in between that does not count, and one more batch."""
    job = verify(tmp_path, TORCH + PREPARE)
    assert (job.code, job.left) == (0, []), job.output
    lines = lines_of(job)
    assert lines[2].startswith("1 rank and 2, 7 steps; allowed relative difference 0.00024 (from float32)")
    assert lines[3:6] == [
        "  samples        71 values, the same",
        "  weights        7 values, the same",
        "  loss           not seen",
    ]
    assert lines[6].startswith("  gradients      28 values, largest relative difference "), job.output
    assert lines[7] == "  learning rate  7 values, the same"
    assert lines[8].startswith("  parameters     32 values, largest relative difference "), job.output
    assert lines[-1].endswith("script.py: equal")
    said = "mpitrain verify: comparing the steps of torch.optim's optimizers: "
    assert job.stdout.count(said) == 1
    assert job.stdout.index(said) < job.stdout.index("verify: the run on several ranks")


@pytest.mark.nightly
@pytest.mark.parametrize("in_rounds", [False, True], ids=["the other model", "the model"])
def test_a_loop_in_rounds(tmp_path: Path, in_rounds: bool) -> None:
    """Only the steps of an optimizer in rounds are a rank's own. Here the other model makes none, or all."""
    train = "model, optimizer, loader = mpitrain.torch.prepare(model, optimizer, loader)\n"
    job = verify(tmp_path, TORCH + IN_ROUNDS + (train if not in_rounds else "model, optimizer = other, its\n") + LOOP)
    assert (job.code, job.left) == (0, []), job.output
    assert ("from step 1 on, each rank trains by itself" in job.stdout) == in_rounds, job.output
    assert lines_of(job)[3] == "  samples        71 values, the same"


@pytest.mark.nightly
def test_a_loop_over_ddp(tmp_path: Path) -> None:
    """The report has the names of parameters. The loader of each rank has its part."""
    job = verify(tmp_path, TORCH + DDP, steps=6)
    assert (job.code, job.left) == (0, []), job.output
    assert "  samples        72 values, the same" in job.stdout
    assert re.search(r"  gradients      24 values, .*, in step \d, module\.[02]\.(weight|bias)\n", job.stdout), (
        job.output
    )


# More calls of world.mean in a step than steps are compared.
BY_HAND = """
world = mt.init()
loader = mpitrain.torch.shard(torch.utils.data.DataLoader(data, 12))

def average():
    for parameter in model.parameters():
        parameter.grad = torch.from_numpy(world.mean(parameter.grad.numpy()))

for epoch in itertools.count():
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        average()
        optimizer.step()
        after_step()
"""
RIGHT = "after_step = lambda: None\n"
SHRINKS = """
@torch.no_grad()
def after_step():
    model[2].weight.mul_(1 - 0.01 * world.size)
"""
SCALED = """
class Scaled(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= world.size * group["lr"] * parameter.grad

optimizer = Scaled(model.parameters(), lr=1e-4)
"""


@pytest.mark.nightly
def test_a_loop_that_averages_by_itself(tmp_path: Path) -> None:
    """The samples of its first step count too."""
    job = verify(tmp_path, TORCH + RIGHT + BY_HAND, steps=3)
    assert (job.code, job.left) == (0, []), job.output
    assert "1 rank and 2, 3 steps; " in job.stdout
    assert "  samples        36 values, the same" in job.stdout
    assert "  gradients      12 values, " in job.stdout
    assert "  parameters     16 values, " in job.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (SCALED, "step 1, parameters: 0.weight: changed by "),
        (SHRINKS, "step 1, parameters: 2.weight: changed before step 2 began by "),
    ],
    ids=["its optimizer", "by hand"],
)
def test_an_update_that_knows_the_number_of_ranks(tmp_path: Path, wrong: str, where: str) -> None:
    before = "" if wrong is SHRINKS else RIGHT
    job = verify(tmp_path, TORCH + before + wrong + BY_HAND, steps=2)
    assert (job.code, job.left) == (1, []), job.output
    (first,) = re.findall(r"^verify: first difference: (.*)$", job.stdout, re.M)
    assert first.startswith(where), job.output
    if wrong is SCALED:
        assert "; multiplied by 2, the number of ranks: is world.size in the update?" in first, first


@pytest.mark.nightly
def test_a_loop_in_jax(tmp_path: Path) -> None:
    job = verify(tmp_path, JAX, steps=6)
    assert (job.code, job.left) == (0, []), job.output
    assert "1 rank and 2, 6 calls of world.mean or world.sum" in job.stdout
    assert "  samples        66 values, the same" in job.stdout
    assert "  weights        6 values, the same" in job.stdout
    assert "  results        12 values, largest relative difference " in job.stdout
    assert "  parameters     6 values, largest relative difference " in job.stdout  # the first ones, and 5 updates
    assert "the samples of world.shard, and 1 as each call finds them. Losses, " in job.stdout


@pytest.mark.parametrize("jit", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_an_update_in_jax_that_knows_the_number_of_ranks(tmp_path: Path, jit: bool) -> None:
    """Parameters in a dict, behind a number that has no gradient; the step is too small for the next gradient."""
    source = JAX.replace("w - 0.05 * gradient", "{'w': w['w'] - 1e-5 * mt.init().size * gradient['w']}")
    source = source.replace("import mpitrain.jax\n", "import mpitrain as mt\nimport mpitrain.jax\n", 1)
    source = source.replace("x @ w - y", "x @ w['w'] - y").replace("jnp.zeros(4)", "{'w': jnp.ones(4)}")
    source = source if jit else source.replace("step = jax.jit(step)\n", "")
    job = verify(tmp_path, source, steps=2)
    assert (job.code, job.left) == (1, []), job.output
    (first,) = re.findall(r"^verify: first difference: (.*)$", job.stdout, re.M)
    assert first.startswith("call 1, parameters: 1/w: changed before call 2 began by "), first
    assert "; multiplied by 2, the number of ranks: is world.size in the update?" in first, first


@pytest.mark.nightly
def test_a_loop_in_jax_without_parameters(tmp_path: Path) -> None:
    """weighted_mean is not given them. It is said in the first run."""
    whole = "mpitrain.jax.mean(jax.value_and_grad(loss), weight=lambda w, x, y: len(x))(w, x, y)"
    assert whole in JAX
    source = JAX.replace(whole, "mpitrain.jax.weighted_mean(jax.value_and_grad(loss)(w, x, y), len(x))")
    job = verify(tmp_path, source, steps=2)
    assert (job.code, job.left) == (0, []), job.output
    assert "Losses, learning rates, parameters and metrics are not seen. " in job.stdout
    assert "  parameters     not seen" in job.stdout
