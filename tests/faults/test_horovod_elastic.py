"""`hvd.elastic`: a killed rank, with --recover and with --restarts; the results are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from faults.conftest import need
from faults.dying import DYING
from faults.outcome import report_of, succeeded
from faults.test_recovery_of_programs import OF_TORCH
from jobs import REPOSITORY, VENVS, Job, run_command

STEPS, SAMPLES = 12, 60

# A regression over all samples, in parts, so that the parameters depend on each step once. Each third step commits.
SCRIPT = """
import json, os, pathlib, signal, sys
import numpy
import mpitrain as mt
from mpitrain.horovod import elastic

folder, (STEPS, SAMPLES) = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
me = mt.init().rank
calls, resets = 0, []
"""
SCRIPT += DYING
SCRIPT += """
random = numpy.random.default_rng(0)
x, y = random.standard_normal((SAMPLES, 4)), random.standard_normal(SAMPLES)
x = numpy.hstack([x, numpy.ones((SAMPLES, 1))])
MODEL

@elastic.run
def train(state, word):
    global calls
    calls += 1
    assert word == "word"
    while state.step < STEPS:
        world = mt.init()
        part = slice(world.rank, None, world.size)
        gradient = 2 * x[part].T @ (x[part] @ weights() - y[part]) / len(x[part])
        state.used.append(state.step + 1)  # before the others can hear of a loss
        IN_BACKWARD
        update(world.mean(gradient, weight=len(x[part])))
        state.step += 1
        IN_STEP
        if state.step % 3 == 0:
            state.commit()
    return "trained"

state.register_reset_callbacks([lambda: resets.append(mt.init().size)])
assert train(state, "word") == "trained"
said = {"weights": weights().tolist(), "calls": calls, "resets": resets, "used": state.used}
(folder / f"rank{me}.json").write_text(json.dumps(said))
"""
# Rank 0's model is the one that counts.
MODELS = {
    "objects": """
def weights():
    return state.w

def update(mean):
    state.velocity *= 0.9
    state.velocity += mean
    state.w = state.w - 0.05 * state.velocity

state = elastic.ObjectState(w=numpy.array([0.1, 0.1, 0.1, 0.1, 0.2]) + me, velocity=numpy.zeros(5), step=0, used=[])
""",
    "torch": """
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(4, 1, dtype=torch.float64)
torch.nn.init.constant_(model.weight, 0.1 + me)
torch.nn.init.constant_(model.bias, 0.2 + me)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

def weights():
    return torch.cat([model.weight[0], model.bias]).detach().numpy()

def update(mean):
    model.weight.grad, model.bias.grad = torch.from_numpy(mean[None, :4]), torch.from_numpy(mean[4:])
    optimizer.step()

state = elastic.TorchState(model, optimizer, step=0, used=[])
""",
}
# PyTorch takes each rank seconds of a core; tests/torch_ranks has its state in a job that runs anyway.
KINDS = ["objects", pytest.param("torch", marks=pytest.mark.nightly)]


def train(
    folder: Path, ranks: int, *options: str, vendor: str, kind: str = "objects", step: str = "pass", backward: str = ""
) -> Job:
    source = SCRIPT.replace("MODEL", MODELS[kind]).replace("IN_STEP", step).replace("IN_BACKWARD", backward)
    return start(folder, source, ranks, *options, vendor=vendor, needs_torch=kind == "torch")


def start(folder: Path, source: str, ranks: int, *options: str, vendor: str, needs_torch: bool) -> Job:
    (folder / "packages").mkdir()
    if needs_torch:
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        for name in OF_TORCH if vendor == "openmpi" else []:  # .venv-openmpi has no PyTorch
            (folder / "packages" / name).symlink_to(Path(torch.__file__).parents[1] / name)
    (folder / "train.py").write_text(source)
    command = [str(VENVS[need(vendor)] / "bin/python"), "-m", "mpitrain", "run", "-n", str(ranks), *options]
    env = {"PYTHONPATH": f"{REPOSITORY}:{folder / 'packages'}", "MPITRAIN_MEMORY_STEPS": "1"}
    return run_command([*command, "train.py", str(folder), json.dumps([STEPS, SAMPLES])], cwd=folder, env=env)


def said_by(folder: Path, ranks: list[int]) -> list[tuple[object, object]]:
    """The calls and resets of these ranks, and of no others. The weights are those of one process."""
    assert sorted(path.name for path in folder.glob("rank*.json")) == [f"rank{rank}.json" for rank in ranks]
    said = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in ranks]
    random = numpy.random.default_rng(0)
    x, y = random.standard_normal((SAMPLES, 4)), random.standard_normal(SAMPLES)
    x = numpy.hstack([x, numpy.ones((SAMPLES, 1))])
    w, velocity = numpy.array([0.1] * 4 + [0.2]), numpy.zeros(5)
    for _ in range(STEPS):
        velocity = 0.9 * velocity + 2 * x.T @ (x @ w - y) / SAMPLES
        w = w - 0.05 * velocity
    for one in said:
        assert one["weights"] == said[0]["weights"]
        numpy.testing.assert_allclose(one["weights"], w, rtol=1e-9)
        assert one["used"] == list(range(1, STEPS + 1))
    return [(one["calls"], one["resets"]) for one in said]


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_go_on(tmp_path: Path, kind: str) -> None:
    """Rank 0 dies before the first commit, and rank 2 two steps after one: nothing of these steps is left."""
    wrong = {"backward": "if me == 0 and state.step == 1: die()", "step": "if me == 2 and state.step == 5: die()"}
    succeeded(train(tmp_path, 4, "--recover", vendor="openmpi", kind=kind, **wrong))
    assert said_by(tmp_path, [1, 3]) == [(3, [3, 2])] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart(tmp_path: Path, kind: str) -> None:
    """All ranks are new, go on from the commit, and have called the callbacks."""
    wrong = "if me == 1 and state.step == 5 and once('killed'): die()"
    job = train(tmp_path, 2, "--restarts", "1", vendor="mpich", kind=kind, step=wrong)
    succeeded(job)
    assert "resumed from memory at step 1\n" in job.stdout
    assert said_by(tmp_path, [0, 1]) == [(1, [2])] * 2


def test_an_error_of_the_script(tmp_path: Path) -> None:
    """It is no loss, also if it is Horovod's, so it ends the job."""
    wrong = "if state.step == 5: raise elastic.HorovodInternalError('of the script')"
    report_of(train(tmp_path, 2, "--recover", vendor="openmpi", step=wrong), "HorovodInternalError: of the script")


# A script in Horovod's form. Each number of ranks that is left divides the samples, so the mean over ranks is that of
# all samples. A rank dies while the gradients of all ranks are on their way.
WITH_CALLS = """
import json, os, pathlib, signal, sys
import torch
import mpitrain.horovod.torch as hvd

folder, (STEPS, SAMPLES) = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
torch.set_num_threads(1)
hvd.init()
me, calls, resets = hvd.rank(), 0, []
"""
WITH_CALLS += DYING
WITH_CALLS += """
x = torch.arange(SAMPLES * 2, dtype=torch.float64).reshape(SAMPLES, 2).sin()
model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
torch.nn.init.constant_(model.weight, 0.1 + me)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

@hvd.elastic.run
def train(state):
    global calls
    calls += 1
    while state.step < STEPS:
        part = x[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        (model(part) - part.sum(1, keepdim=True)).square().mean().backward()
        if me == 1 and state.step == 5:
            die()
        optimizer.step()
        state.total += hvd.allreduce(part.sum(), op=hvd.Sum, name="total").item()
        state.step += 1
        if state.step % 2 == 0:
            state.commit()

state = hvd.elastic.TorchState(model, optimizer, step=0, total=0.0)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
said = {"weights": model.weight[0].tolist(), "total": state.total, "calls": calls, "resets": resets}
(folder / f"rank{me}.json").write_text(json.dumps(said))
"""


def test_the_named_calls_go_on(tmp_path: Path) -> None:
    """Step 6 is left half done, and step 5 is made again, because it was not committed."""
    succeeded(start(tmp_path, WITH_CALLS, 3, "--recover", vendor="openmpi", needs_torch=True))
    assert sorted(path.name for path in tmp_path.glob("rank*.json")) == ["rank0.json", "rank2.json"]
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 2)]
    assert said[0] == said[1]
    x = numpy.sin(numpy.arange(SAMPLES * 2.0).reshape(SAMPLES, 2))
    w, velocity = numpy.full(2, 0.1), numpy.zeros(2)
    for _ in range(STEPS):
        velocity = 0.9 * velocity + 2 * x.T @ (x @ w - x.sum(axis=1)) / SAMPLES
        w = w - 0.05 * velocity
    numpy.testing.assert_allclose(said[0]["weights"], w, rtol=1e-9)
    assert said[0]["total"] == pytest.approx(STEPS * x.sum(), rel=1e-9)
    assert (said[0]["calls"], said[0]["resets"]) == (2, [2])
