"""`mpitrain verify` from outside: a right script, and the faults that it is there to find."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from jobs import Job, run_command
from mpitrain.cli import main

# A regression of 50 samples, 11 in a step. What a test wants to be wrong it sets in between.
BEGIN = """
import sys
import numpy
import mpitrain as mt

world = mt.init()
random = numpy.random.default_rng(0)
x, y = random.standard_normal((50, 4)), random.standard_normal(50)

def regression(parameters, batch, on_gradient):
    x, y = batch
    error = x @ parameters["w"] + parameters["b"] - y
    on_gradient("b", 2 * error.sum(keepdims=True) / max(len(x), 1))
    on_gradient("w", 2 * x.T @ error / max(len(x), 1))
    return float((error**2).mean()) if len(x) else 0.0

def make_data(world):
    return mt.ArrayData(world, (x, y), global_batch=11)

class Batches:
    # Data of a user's own: `part` says which samples of a batch are this rank's, `weigh` what they weigh.
    epoch, steps_per_epoch, cursor = 0, 5, 0

    def __next__(self):
        begin, self.cursor = self.cursor, self.cursor + 11
        mine = part(begin)
        return (x[mine], y[mine]), weigh(mine)

    def state(self):
        return {"cursor": self.cursor}

    def restore(self, state):
        self.cursor = state["cursor"]

def part(begin):
    return numpy.arange(begin, begin + 11)[world.rank :: world.size]

def weigh(mine):
    return len(mine)
"""
TRAIN = """
def build(world):
    adapter = mt.ArrayFunction(regression, {"w": numpy.zeros(4), "b": numpy.zeros(1)}, mt.Sgd(0.05, momentum=0.9))
    return mt.Parts(adapter, mt.Sync(), make_data(world))

def metrics(trainer):
    parameters = trainer.adapter.parameters()
    return mt.evaluate(world, lambda batch: {"error": regression(parameters, batch, lambda *_: None)}, (x, y))

hooks = [mt.StopAtStep(1000), mt.Evaluate(2, metrics)]
if sys.argv[1:]:
    hooks += [mt.Record([mt.JsonLines(sys.argv[1])]), mt.Checkpoint(sys.argv[1], 1)]
mt.Trainer(build, hooks).run()
raise AssertionError("verify must end the script before")
"""
LOOP = """
w = world.sync(numpy.zeros(4))
for epoch in range(100):
    for part_x, part_y in world.shard([(x[begin : begin + 11], y[begin : begin + 11]) for begin in range(0, 50, 11)]):
        error = part_x @ w - part_y
        w = w - 0.05 * mean(2 * part_x.T @ error / max(len(part_x), 1), len(part_x))
raise AssertionError("verify must end the script before")
"""


def verify(folder: Path, source: str, *arguments: str, ranks: int = 3, options: tuple[str, ...] = ()) -> Job:
    script = folder / "script.py"
    script.write_text(source)
    command = [sys.executable, "-m", "mpitrain", "verify", "-n", str(ranks), "--hosts", "localhost", *options]
    return run_command([*command, str(script), *arguments])


def differs(job: Job, where: str, *parts: str) -> None:
    """Assert that the output names this place as the first difference, with each of `parts`."""
    assert job.code == 1, job.output
    assert job.left == []
    assert job.stderr == ""
    (found,) = re.findall(r"^verify: first difference: (.*)$", job.stdout, re.M)
    assert found.startswith(where), job.output
    for part in parts:
        assert part in found, found
    assert job.stdout.endswith("script.py: not equal\n")


def test_the_example_is_equal() -> None:
    command = [sys.executable, "-m", "mpitrain", "verify", "-n", "3", "--hosts", "localhost", "--steps", "4"]
    job = run_command([*command, "examples/train.py", "--data", "digits"])
    assert job.code == 0, job.output
    assert job.left == []
    lines = [line.removeprefix("verify: ") for line in job.stdout.splitlines() if line.startswith("verify: ")]
    assert lines[2] == "1 rank and 3, 4 steps; allowed relative difference 0.00024 (from float32)"
    assert lines[3:5] == ["  samples        512 values, the same", "  weights        4 values, the same"]
    assert lines[7] == "  learning rate  4 values, the same"
    assert lines[9] == "  metrics        1 values, largest relative difference 0"
    assert lines[10:] == ["examples/train.py: equal"]
    found = [
        re.fullmatch(r"  (\w+) +\d+ values, largest relative difference (\S+)(, in.*)?", lines[number])
        for number in (5, 6, 8)
    ]
    assert [one[1] for one in found if one] == ["loss", "gradients", "parameters"]
    assert all(float(one[2].rstrip(",")) < 1e-5 for one in found if one)


def test_a_right_script_leaves_nothing_behind(tmp_path: Path) -> None:
    """Verify leaves no checkpoint either: the second run would go on from those of the first."""
    checkpoints = tmp_path / "checkpoints"
    job = verify(tmp_path, BEGIN + TRAIN, str(checkpoints), options=("--directory", str(tmp_path / "records")))
    assert job.code == 0, job.output
    for name in ("Checkpoint", "Record"):
        assert f"leaving out the hook {name}, which reads or writes files" in job.stdout
    assert not checkpoints.exists()
    assert "metrics        3 values" in job.stdout  # after steps 2, 4, and 5, which is the last one
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl")) == [
        "records/one-rank/record.jsonl",
        "records/several-ranks/record.jsonl",
    ]


@pytest.mark.slow
def test_data_of_a_users_own_that_are_right(tmp_path: Path) -> None:
    job = verify(tmp_path, BEGIN + "make_data = lambda world: Batches()" + TRAIN, options=("--steps", "4"))
    assert job.code == 0, job.output


def test_a_mean_by_ranks(tmp_path: Path) -> None:
    wrong = "make_data = lambda world: Batches()\nweigh = lambda mine: 1\n"
    differs(
        verify(tmp_path, BEGIN + wrong + TRAIN, options=("--steps", "4")),
        "step 1, weights: ",
        "1 on 1 rank, 3 on 3 (1, 1, 1); every rank has weight 1, so this is a mean over ranks, not over samples",
    )


@pytest.mark.slow
def test_samples_that_two_ranks_read(tmp_path: Path) -> None:
    """Parts of equal length: in the first batch of 11 that 3 ranks share, each takes 4 from begin + 3 x rank on."""
    wrong = """
make_data = lambda world: Batches()
def part(begin):
    length = -(-11 // world.size)
    start = begin + 11 // world.size * world.rank
    return numpy.arange(start, start + length)
"""
    differs(
        verify(tmp_path, BEGIN + wrong + TRAIN, options=("--steps", "2")),
        "step 1, samples: ",
        "11 samples on 1 rank, 12 on 3",
        "2 samples read more often than on 1 rank, such as number 3 (from 0) of the batch there, by ranks 0, 1",
        "1 of the batch on 1 rank read by no rank, such as number 10 (from 0)",
    )


@pytest.mark.slow
def test_a_seed_with_the_rank_in_it(tmp_path: Path) -> None:
    """Dropout inside the model: the samples are right, and the gradients are not (nor, once w is not 0, the loss)."""
    wrong = """
dropout = numpy.random.default_rng(world.rank)
whole = regression
def regression(parameters, batch, on_gradient):
    x, y = batch
    return whole(parameters, (x * (dropout.random(x.shape) < 0.5), y), on_gradient)
"""
    job = verify(tmp_path, BEGIN + wrong + TRAIN)
    differs(job, "step 1, gradients: w: norm ", " on several, ", " apart: the relative difference is 0.")
    assert "samples        50 values, the same" in job.stdout
    assert "then: step 2, loss: loss is " in job.stdout


@pytest.mark.slow
def test_augmentation_with_the_rank_in_its_seed(tmp_path: Path) -> None:
    wrong = """
noise = numpy.random.default_rng(world.rank)
make_data = lambda world: Batches()
class Noisy(Batches):
    def __next__(self):
        (x, y), weight = super().__next__()
        return (x + noise.standard_normal(x.shape), y), weight
Batches = Noisy
"""
    differs(
        verify(tmp_path, BEGIN + wrong + TRAIN, options=("--steps", "2")), "step 1, samples: ", "the order differs, or"
    )


def test_an_optimizer_that_knows_the_number_of_ranks(tmp_path: Path) -> None:
    """The difference is in the only step, so no later gradient shows it."""
    wrong = """
class Scaled(mt.Sgd):
    def _apply(self, block, rate):
        super()._apply(block, rate * world.size)
mt.Sgd = Scaled
"""
    job = verify(tmp_path, BEGIN + wrong + TRAIN, options=("--steps", "1"))
    differs(job, "step 1, parameters: w: changed by ", "; multiplied by 3, the number of ranks", "; 2 of 2 differ")


@pytest.mark.slow
def test_a_loop_without_a_trainer(tmp_path: Path) -> None:
    right = "mean = lambda tree, weight: world.mean(tree, weight=weight)\n"
    job = verify(tmp_path, BEGIN + right + LOOP, options=("--steps", "7"))
    assert job.code == 0, job.output
    assert "1 rank and 3, 7 calls of world.mean or world.sum; allowed relative difference 1.1e-08" in job.stdout
    assert "  samples        72 values, the same" in job.stdout  # 4 x 11 + 6 + 2 x 11
    assert "  results        7 values, " in job.stdout


@pytest.mark.slow
def test_a_loop_that_means_by_ranks(tmp_path: Path) -> None:
    wrong = "mean = lambda tree, weight: world.mean(tree)\n"
    job = verify(tmp_path, BEGIN + wrong + LOOP)
    differs(job, "call 1, results: the result: norm ", "weight=len(x) gives the mean over samples")


# Parameters that the loop changes in place, in the array that world.sync gave.
IN_PLACE = """
w = world.sync({"w": numpy.zeros(4)})["w"]
for epoch in range(100):
    for part_x, part_y in world.shard([(x[begin : begin + 11], y[begin : begin + 11]) for begin in range(0, 44, 11)]):
        gradient = 2 * part_x.T @ (part_x @ w - part_y) / max(len(part_x), 1)
        w -= rate * mean(gradient, len(part_x))
raise AssertionError("verify must end the script before")
"""
REDUCER = """
reducer = mt.GradientReducer(world, [mt.Parameter("w", (4,), numpy.dtype("float64"))])
def mean(gradient, weight):
    reducer.begin(weight)
    reducer.ready(0, gradient)
    reducer.finish()
    return reducer.gradients[0]
"""
CALLS = "mean = lambda tree, weight: world.mean(tree, weight=weight)\n"


@pytest.mark.parametrize(("means", "unit"), [(CALLS, "call"), (REDUCER, "step")], ids=["calls", "reducer"])
def test_a_loop_of_its_own_whose_update_knows_the_number_of_ranks(tmp_path: Path, means: str, unit: str) -> None:
    """The last update that is compared: all that come of it are unseen."""
    wrong = "rate = 1e-9 * world.size\n"  # too small for the next gradient to tell
    job = verify(tmp_path, BEGIN + wrong + means + IN_PLACE, options=("--steps", "2", "--tolerance", "1e-4"))
    where = f"{unit} 1, parameters: ['w']: changed before {unit} 2 began by "
    differs(job, where, "; multiplied by 3, the number of ranks: is world.size in the update?")
    (said,) = re.findall(r"^mpitrain verify: (comparing .*)$", job.stdout, re.M)
    assert said.endswith(
        f", weights, the samples of world.shard, and ['w'] as each {unit} finds them. Losses, learning rates and "
        "metrics are not seen"
    )


def test_a_loop_of_its_own_that_is_right(tmp_path: Path) -> None:
    """The first values, and what two updates have made of them."""
    job = verify(tmp_path, BEGIN + "rate = 0.05\n" + CALLS + IN_PLACE, options=("--steps", "3"))
    assert job.code == 0, job.output
    assert "  parameters     3 values, largest relative difference " in job.stdout


def test_what_is_not_seen_of_a_loop_is_said_at_once(tmp_path: Path) -> None:
    """`w = w - ...`: the second call finds that the array is gone. Without world.sync, there was none."""
    job = verify(tmp_path, BEGIN + CALLS + LOOP, options=("--steps", "2"))
    assert job.code == 0, job.output
    first, second = job.stdout.split("verify: the run on several ranks\n")
    assert "and the array as each call finds them. Losses" in first
    assert "mpitrain verify: the array: not seen from call 2 on. The script has replaced the array that " in first
    assert "mpitrain verify" not in second
    job = verify(tmp_path, BEGIN + CALLS + LOOP.replace("world.sync", ""), options=("--steps", "2"))
    assert job.code == 0, job.output
    assert "Losses, learning rates, parameters and metrics are not seen. Parameters are seen if " in job.stdout
    unchanged = "kept = world.sync(numpy.zeros(2))\n"
    job = verify(tmp_path, BEGIN + unchanged + CALLS + LOOP.replace("world.sync", ""), options=("--steps", "2"))
    assert "mpitrain verify: no parameter changed between the 2 calls, so updates are not compared" in job.stdout


def test_a_script_that_cannot_be_seen(tmp_path: Path) -> None:
    job = verify(tmp_path, "import mpitrain as mt\nmt.init().barrier()")
    assert job.code == 1, job.output
    assert "verify cannot see what " in job.stderr
    assert "on one rank there was no step of Trainer.run, of an optimizer of PyTorch " in job.stderr
    assert "several ranks" not in job.stdout


@pytest.mark.slow
def test_a_script_that_fails_on_several_ranks(tmp_path: Path) -> None:
    job = verify(tmp_path, BEGIN + "assert world.size == 1\n" + TRAIN)
    assert job.code == 1, job.output
    text = r"^mpitrain verify: the run on several ranks failed \(\d+\); there is nothing to compare$"
    assert re.search(text, job.stderr, re.M)
    assert "AssertionError" in job.stderr
    assert job.left == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0", __file__], "--steps is 0; it must be at least 1"),
        (["--tolerance", "-1", __file__], "--tolerance is -1.0; it must be a finite number of at least 0"),
        (["--tolerance", "nan", __file__], "--tolerance is nan; it must be a finite number of at least 0"),
        (["examples/trian.py"], "there is no script 'examples/trian.py' in "),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "-n", "2", *options]) == 2
    assert f"mpitrain verify: {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = verify(tmp_path, BEGIN + TRAIN, options=("--directory", str(tmp_path / "file")))
    assert job.code == 1, job.output
    path = tmp_path / "file/one-rank/record.jsonl"
    assert job.stderr == (
        f"mpitrain verify: cannot make the record {path}: Not a directory; name a folder that you can write to: "
        "mpitrain verify --directory PATH\n"
    )
