"""`mpitrain verify` from outside: a right script, and the faults that it is there to find."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from verified import BEGIN, differs, verify

from jobs import run_command
from mpitrain.cli import main
from mpitrain.last_word import keep_word, last_word

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
    """Verify leaves no checkpoint. Otherwise the second run would go on from the checkpoints of the first."""
    checkpoints = tmp_path / "checkpoints"
    job = verify(tmp_path, BEGIN + TRAIN, str(checkpoints), options=("--directory", str(tmp_path / "records")))
    assert job.code == 0, job.output
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
    kept = last_word("verify", tmp_path / "script.py")
    assert kept is not None and (kept.is_equal, kept.arguments) == (False, [])
    assert any(line.startswith("first difference: step 1, weights: 1 on 1 rank") for line in kept.lines)


@pytest.mark.nightly
def test_samples_that_two_ranks_read(tmp_path: Path) -> None:
    """The parts have equal lengths. Of a batch of 11, each of 3 ranks takes 4 samples from begin + 3 x rank on."""
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


@pytest.mark.nightly
def test_a_seed_with_the_rank_in_it(tmp_path: Path) -> None:
    """The model has dropout. The samples are right, and the gradients are wrong. So is the loss, once w is not 0."""
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


@pytest.mark.nightly
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
class Scaled(mt.optim.SGD):
    def _apply(self, block, rate):
        super()._apply(block, rate * world.size)
mt.optim.SGD = Scaled
"""
    job = verify(tmp_path, BEGIN + wrong + TRAIN, options=("--steps", "1"))
    differs(job, "step 1, parameters: w: changed by ", "; multiplied by 3, the number of ranks", "; 2 of 2 differ")


def test_a_script_that_cannot_be_seen(tmp_path: Path) -> None:
    job = verify(tmp_path, "import mpitrain as mt\nmt.init().barrier()")
    assert job.code == 1, job.output
    assert "verify cannot see what " in job.stderr
    assert "on one rank there was no step of Trainer.run, of an optimizer of PyTorch " in job.stderr
    assert "several ranks" not in job.stdout


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = verify(tmp_path, BEGIN + TRAIN, options=("--directory", str(tmp_path / "file")))
    assert job.code == 1, job.output
    path = tmp_path / "file/one-rank/record.jsonl"
    assert job.stderr == (
        f"mpitrain verify: cannot make the record {path}: Not a directory; name a folder that you can write to: "
        "mpitrain verify --directory PATH\n"
    )


ROUNDS = TRAIN.replace("mt.Sync()", "mt.DiLoCo(2)")


def test_rounds(tmp_path: Path) -> None:
    """A step of a round is not that of one rank. The samples of all ranks are, and the loss of the first step."""
    job = verify(tmp_path, BEGIN + ROUNDS, options=("--steps", "4"))
    assert job.code == 0, job.output
    found = dict(
        re.findall(r"^verify:   (samples|loss|gradients|learning rate|parameters|metrics) +(.*)$", job.stdout, re.M)
    )
    assert found["samples"] == "44 values, the same"
    assert found["learning rate"] == "4 values, the same"
    assert found["loss"].startswith("1 values, largest relative difference ")
    assert found["parameters"].startswith("2 values, largest relative difference 0")  # those of the beginning
    assert found["gradients"] == found["metrics"] == "not seen"
    assert (
        "verify:   from step 1 on, each rank trains by itself, and no step is meant to equal that of 1 rank"
        in job.stdout
    )
    wrong = "make_data = lambda world: Batches()\nweigh = lambda mine: 1\n"
    job = verify(tmp_path, BEGIN + wrong + ROUNDS, options=("--steps", "4"))
    differs(job, "step 1, weights: ", "1 on 1 rank, 3 on 3 (1, 1, 1)")
