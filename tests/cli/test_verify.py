"""`mpitrain verify` from outside: right scripts, and the faults that it is there to find. Comparisons: tests/verify."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from jobs import NO_STALLS, Job, run_command
from mpitrain.cli import main
from mpitrain.last_word import keep_word, last_word

# A regression of 50 samples, 11 in a step. A test sets what is to be wrong between BEGIN and the rest.
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
    return mt.data.ArrayData(world, (x, y), global_batch=11)

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
    adapter = mt.ArrayFunction(regression, {"w": numpy.zeros(4), "b": numpy.zeros(1)}, mt.optim.SGD(0.05, momentum=0.9))
    return mt.Parts(adapter, mt.Sync(), make_data(world))

def metrics(trainer):
    parameters = trainer.adapter.parameters()
    return mt.evaluate(world, lambda batch: {"error": regression(parameters, batch, lambda *_: None)}, (x, y))

hooks = [mt.StopAtStep(1000), mt.Evaluation(2, metrics)]
if sys.argv[1:]:
    hooks += [mt.Record([mt.writers.JsonLines(sys.argv[1])]), mt.Checkpoint(sys.argv[1], 1)]
mt.Trainer(build, hooks).run()
raise AssertionError("verify must end the script before")
"""
ROUNDS = TRAIN.replace("mt.Sync()", "mt.DiLoCo(2)")
LOOP = """
w = world.broadcast(numpy.zeros(4))
for epoch in range(100):
    for part_x, part_y in world.shard([(x[begin : begin + 11], y[begin : begin + 11]) for begin in range(0, 50, 11)]):
        error = part_x @ w - part_y
        w = w - 0.05 * mean(2 * part_x.T @ error / max(len(part_x), 1), len(part_x))
raise AssertionError("verify must end the script before")
"""
# The loop changes its parameters in place, in the array that world.broadcast returned.
IN_PLACE = """
w = world.broadcast({"w": numpy.zeros(4)})["w"]
for epoch in range(100):
    for part_x, part_y in world.shard([(x[begin : begin + 11], y[begin : begin + 11]) for begin in range(0, 44, 11)]):
        gradient = 2 * part_x.T @ (part_x @ w - part_y) / max(len(part_x), 1)
        w -= rate * mean(gradient, len(part_x))
raise AssertionError("verify must end the script before")
"""
CALLS = "mean = lambda tree, weight: world.mean(tree, weight=weight)\n"
REDUCER = """
reducer = mt.GradientReducer(world, [mt.Parameter("w", (4,), numpy.dtype("float64"))])
def mean(gradient, weight):
    reducer.begin(weight)
    reducer.ready(0, gradient)
    reducer.finish()
    return reducer.gradients[0]
"""
BY_RANKS = "make_data = lambda world: Batches()\nweigh = lambda mine: 1\n"


def verify(folder: Path, source: str, *arguments: str, ranks: int = 3, options: tuple[str, ...] = ()) -> Job:
    script = folder / "script.py"
    script.write_text(BEGIN + source)
    command = [sys.executable, "-m", "mpitrain", "verify", "-n", str(ranks), "--hosts", "localhost", *options]
    return run_command([*command, str(script), *arguments], env=NO_STALLS)


def differs(job: Job, where: str, *parts: str) -> None:
    """Assert that the output names this place as the first difference, with each of `parts`."""
    assert (job.code, job.left, job.stderr) == (1, [], ""), job.output
    (found,) = re.findall(r"^verify: first difference: (.*)$", job.stdout, re.M)
    assert found.startswith(where), job.output
    for part in parts:
        assert part in found, found
    assert job.stdout.endswith("script.py: not equal\n")


def test_a_right_script_leaves_nothing_behind(tmp_path: Path) -> None:
    """Verify leaves no checkpoint. Otherwise the second run would continue from the checkpoints of the first."""
    checkpoints = tmp_path / "checkpoints"
    job = verify(tmp_path, TRAIN, str(checkpoints), ranks=2, options=("--directory", str(tmp_path / "records")))
    assert (job.code, job.left) == (0, []), job.output
    for name in ("Checkpoint", "Record"):
        assert f"leaving out the hook {name}, which reads or writes files" in job.stdout
    assert not checkpoints.exists()
    kept = last_word("verify", tmp_path / "script.py")
    assert kept is not None and (kept.is_equal, kept.arguments) == (True, [str(checkpoints)])
    assert [f"verify: {line}" for line in kept.lines] == job.stdout.splitlines()[-1 - len(kept.lines) : -1]
    assert "metrics        3 values" in job.stdout  # after steps 2, 4 and 5; step 5 is the last one
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl")) == [
        "records/one-rank/record.jsonl",
        "records/several-ranks/record.jsonl",
    ]


@pytest.mark.parametrize(
    ("code", "keeps"), [(1, True), (128 + signal.SIGSEGV, True), (128 + signal.SIGINT, False), (143, False)]
)
def test_a_run_that_somebody_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, keeps: bool) -> None:
    """Ctrl-C says nothing of the script, so the last result stays. A run that fails has a result."""
    script = tmp_path / "script.py"
    script.write_text("1\n")
    keep_word("verify", script, [], ["equal"], is_equal=True)
    monkeypatch.setattr("mpitrain.launch.start.start", lambda request: code)
    assert main(["verify", "-n", "2", "--hosts", "localhost", str(script)]) == code
    kept = last_word("verify", script)
    assert kept is not None and kept.is_equal is (None if keeps else True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("make_data = lambda world: Batches()" + TRAIN, ("--steps", "4"), "1 rank and 3, 4 steps; "),
        (CALLS + LOOP, ("--steps", "7"), "3, 7 calls of world.mean or world.sum; allowed relative difference 1.1e-08"),
        # The first values, and the values after each of two updates.
        (
            "rate = 0.05\n" + CALLS + IN_PLACE,
            ("--steps", "3"),
            "  parameters     3 values, largest relative difference ",
        ),
    ],
    ids=["data of a user's own", "a loop", "a loop in place"],
)
def test_what_is_right(tmp_path: Path, source: str, options: tuple[str, ...], says: str) -> None:
    job = verify(tmp_path, source, options=options)
    assert job.code == 0 and says in job.stdout, job.output
    if source.endswith(LOOP):
        assert "  samples        72 values, the same" in job.stdout  # 4 x 11 + 6 + 2 x 11
        assert "  results        7 values, " in job.stdout


def test_a_mean_by_ranks(tmp_path: Path) -> None:
    differs(
        verify(tmp_path, BY_RANKS + TRAIN, options=("--steps", "4")),
        "step 1, weights: ",
        "1 on 1 rank, 3 on 3 (1, 1, 1); every rank has weight 1, so this is a mean over ranks, not over samples",
    )
    kept = last_word("verify", tmp_path / "script.py")
    assert kept is not None and (kept.is_equal, kept.arguments) == (False, [])
    assert any(line.startswith("first difference: step 1, weights: 1 on 1 rank") for line in kept.lines)


# The model has dropout. The samples are right, and the gradients are wrong. So is the loss, once w is not 0.
DROPOUT = """
dropout = numpy.random.default_rng(world.rank)
whole = regression
def regression(parameters, batch, on_gradient):
    x, y = batch
    return whole(parameters, (x * (dropout.random(x.shape) < 0.5), y), on_gradient)
"""
# The difference is in the only step, so no later gradient shows it.
SCALED = """
class Scaled(mt.optim.SGD):
    def _apply(self, block, rate):
        super()._apply(block, rate * world.size)
mt.optim.SGD = Scaled
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "steps", "where", "parts"),
    [
        (DROPOUT + TRAIN, 5, "step 1, gradients: w: norm ", (" on several, ", " apart: the relative difference is 0.")),
        (SCALED + TRAIN, 1, "step 1, parameters: w: changed by ", ("; multiplied by 3, the num", "; 2 of 2 differ")),
        (
            "mean = lambda tree, weight: world.mean(tree)\n" + LOOP,
            5,
            "call 1, results: the result: norm ",
            ("weight=len(x) gives the mean over samples",),
        ),
    ],
    ids=["a seed of dropout", "an optimizer", "a loop"],
)
def test_what_is_wrong(tmp_path: Path, source: str, steps: int, where: str, parts: tuple[str, ...]) -> None:
    job = verify(tmp_path, source, options=("--steps", str(steps)))
    differs(job, where, *parts)
    if source.startswith(DROPOUT):
        assert "samples        50 values, the same" in job.stdout
        assert "then: step 2, loss: loss is " in job.stdout


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("world.barrier()", "verify cannot see what "),
        pytest.param("assert world.size == 1\n" + TRAIN, "several ranks failed (", marks=pytest.mark.nightly),
    ],
)
def test_a_script_that_shows_nothing(tmp_path: Path, source: str, says: str) -> None:
    job = verify(tmp_path, source)
    assert (job.code, job.left, says in job.stderr) == (1, [], True), job.output
    if source == "world.barrier()":
        assert "on one rank there was no step of Trainer.run, of an optimizer of PyTorch " in job.stderr
        assert "several ranks" not in job.stdout
    else:
        text = r"^mpitrain verify: the run on several ranks failed \(\d+\); there is nothing to compare$"
        assert re.search(text, job.stderr, re.M) and "AssertionError" in job.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0", __file__], "--steps is 0; it must be at least 1"),
        (["--tolerance", "-1", __file__], "--tolerance is -1.0; it must be a finite number of at least 0"),
        (["--tolerance", "nan", __file__], "--tolerance is nan; it must be a finite number of at least 0"),
        (["examples/trian.py"], "there is no script 'examples/trian.py' in "),
        (
            ["--directory", f"{__file__}/x", __file__],
            (
                f"cannot make the record {__file__}/x/one-rank/record.jsonl: Not a directory; name a folder that you "
                "can write to: mpitrain verify --directory PATH\n"
            ),
        ),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "-n", "2", "--hosts", "localhost", *options]) == (1 if "--directory" in options else 2)
    assert f"mpitrain verify: {message}" in capsys.readouterr().err


def test_rounds(tmp_path: Path) -> None:
    """A step of a round is not that of one rank. The samples of all ranks are, and the loss of the first step."""
    job = verify(tmp_path, ROUNDS, ranks=2, options=("--steps", "4"))
    assert job.code == 0, job.output
    found = dict(
        re.findall(r"^verify:   (samples|loss|gradients|learning rate|parameters|metrics) +(.*)$", job.stdout, re.M)
    )
    assert found["samples"] == "44 values, the same"
    assert found["learning rate"] == "4 values, the same"
    assert found["loss"].startswith("1 values, largest relative difference ")
    assert found["parameters"].startswith("2 values, largest relative difference 0")  # those of the beginning
    assert found["gradients"] == found["metrics"] == "not seen"
    says = "verify:   from step 1 on, each rank trains by itself, so its steps differ from those of 1 rank"
    assert says in job.stdout


@pytest.mark.parametrize(("means", "unit"), [(CALLS, "call"), pytest.param(REDUCER, "step", marks=pytest.mark.nightly)])
def test_a_loop_of_its_own_whose_update_knows_the_number_of_ranks(tmp_path: Path, means: str, unit: str) -> None:
    """The update is the last one that is compared, and nothing that follows from it is seen."""
    wrong = "rate = 1e-9 * world.size\n"  # too small to change the next gradient visibly
    job = verify(tmp_path, wrong + means + IN_PLACE, options=("--steps", "2", "--tolerance", "1e-4"))
    where = f"{unit} 1, parameters: ['w']: changed before {unit} 2 began by "
    differs(job, where, "; multiplied by 3, the number of ranks: is world.size in the update?")
    (said,) = re.findall(r"^mpitrain verify: (comparing .*)$", job.stdout, re.M)
    assert said.endswith(
        f", weights, the samples of world.shard, and ['w'] as each {unit} finds them. Losses, learning rates and "
        "metrics are not seen"
    )


NO_ARRAY = LOOP.replace("world.broadcast", "")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        # The script runs `w = w - ...`, so the second call finds no array.
        (LOOP, "mpitrain verify: the array: not seen from call 2 on. The script has replaced the array that "),
        pytest.param(
            NO_ARRAY,
            "Losses, learning rates, parameters and metrics are not seen. Parameters are seen if ",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "kept = world.broadcast(numpy.zeros(2))\n" + NO_ARRAY,
            "mpitrain verify: no parameter changed between the 2 calls, so updates are not compared",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_is_not_seen_of_a_loop_is_said_at_once(tmp_path: Path, source: str, says: str) -> None:
    job = verify(tmp_path, CALLS + source, ranks=2, options=("--steps", "2"))
    assert job.code == 0, job.output
    first, second = job.stdout.split("verify: the run on several ranks\n")
    assert says in first
    if source == LOOP:
        assert "and the array as each call finds them. Losses" in first
        assert "mpitrain verify" not in second
