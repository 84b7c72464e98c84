"""`mpitrain run --recover` with a codec, a PyTorch module, and a loop of one's own: the results are right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

from faults.conftest import need
from faults.outcome import succeeded
from jobs import REPOSITORY, VENVS, run_command

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


@pytest.mark.parametrize("compression", ["int8", "top_k:0.1", "sign", "power_sgd:2"])
def test_what_a_codec_has_left_out(tmp_path: Path, compression: str) -> None:
    went_on_with_what_is_left_out(tmp_path, CODED, compression)


def test_a_rank_is_lost_between_the_sums_of_the_others(tmp_path: Path) -> None:
    """The step is made again from the factors of before it, which one rank had replaced and another had not."""
    script = CODED.replace("        os.kill(os.getpid(), signal.SIGKILL)\n", "")
    assert script != CODED
    went_on_with_what_is_left_out(tmp_path, AT_THE_SECOND_SUM + script, "power_sgd:2")
    assert (tmp_path / "finished").exists()


def went_on_with_what_is_left_out(tmp_path: Path, script: str, compression: str) -> None:
    """In float64, what was sent and what is left out add up to all gradients, less what the lost rank had left out."""
    (tmp_path / "coded.py").write_text(script)
    command = [str(VENVS[need("openmpi")] / "bin/python"), "-m", "mpitrain", "run", "-n", "3", "--recover"]
    succeeded(run_command([*command, str(tmp_path / "coded.py"), str(tmp_path), compression], cwd=tmp_path))
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


def test_what_is_carried_without_a_codec(tmp_path: Path) -> None:
    """A loss in the first step after a restore: what ranks 0 and 3 carry is in the mean of the next try, once."""
    (tmp_path / "carried.py").write_text(CARRIED)
    command = [str(VENVS[need("openmpi")] / "bin/python"), "-m", "mpitrain", "run", "-n", "4", "--recover"]
    succeeded(run_command([*command, str(tmp_path / "carried.py"), str(tmp_path)], cwd=tmp_path))
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
    """With mt.keep, `update` commits. `update` also copies the state to memory, in each of the Worlds."""
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
