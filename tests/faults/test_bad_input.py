"""Wrong settings, data, models and disks: one clear error for any number of ranks, and nothing half-done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from faults.conftest import need
from faults.outcome import failed, report_of, succeeded
from jobs import REPOSITORY, VENVS, Job, mpiexec, run_command, run_job

PYTHON = str(VENVS["mpich"] / "bin/python")

# A small regression. A test inserts its fault between the parts.
BEGIN = """
import os, pathlib, resource, sys
import numpy
import mpitrain as mt
import mpitrain.training.hooks.checkpoint as its

its._PATIENCE_SECONDS = float("inf")  # every save that is due is there, also on a slow disk
world = mt.init()
rank = world.rank
samples, width, dtype, steps, global_batch, checkpoints = 60, 5, "float64", 4, 12, None
function = lambda parameters, batch, on_gradient: regression(parameters, batch, on_gradient)
"""
TRAIN = """
def regression(parameters, batch, on_gradient):
    x, y = batch
    error = x @ parameters["w"] + parameters["b"] - y
    on_gradient("b", 2 * error.mean(keepdims=True) if len(x) else numpy.zeros(1, dtype))
    on_gradient("w", 2 * x.T @ error / max(len(x), 1))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    random = numpy.random.default_rng(0)
    x, y = random.standard_normal((samples, width)).astype(dtype), random.standard_normal(samples).astype(dtype)
    data = mt.data.ArrayData(world, (x, y), global_batch=global_batch)
    parameters = {"w": numpy.zeros(width, dtype), "b": numpy.zeros(1, dtype)}
    return mt.Parts(mt.ArrayFunction(function, parameters, mt.optim.SGD(0.01, momentum=0.9)), mt.Sync(), data)

hooks = [mt.StopAtStep(steps)]
if checkpoints:
    hooks.append(mt.Checkpoint(checkpoints, steps=2))
trainer = mt.Trainer(build, hooks)
trainer.run()
world.print("trained", trainer.step_number, "steps")
"""


def train(ranks: int, wrong: str = "", *arguments: str) -> Job:
    return run_job(ranks, BEGIN + wrong + TRAIN, *arguments)


def once(job: Job, message: str) -> None:
    """The job failed with a report, and prints `message` once for any number of ranks."""
    report_of(job, message)
    assert job.stderr.count(message) == 1, job.output
    assert "failed too" not in job.stderr, job.output


def test_the_training_that_the_tests_below_break() -> None:
    job = train(3)
    succeeded(job)
    assert job.stdout == "trained 4 steps\n"


# -- settings ----------------------------------------------------------------------------------------------------

INIT = "import os\nimport mpitrain as mt\nprint(mt.init({}).size)"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MPITRAIN_ALGORITM", "ring", "there is no setting MPITRAIN_ALGORITM; did you mean MPITRAIN_ALGORITHM? Known"),
        # tests/test_config.py tests these two errors; a rank meets them in the same place.
        pytest.param(
            *("MPITRAIN_BUCKET_MIB", "big", "MPITRAIN_BUCKET_MIB is 'big'; it must be a float"), marks=pytest.mark.nightly
        ),
        pytest.param(
            *("MPITRAIN_STALL_SECONDS", "nan", "stall_seconds is nan; it must be a number from 0.001 to 1e+06"),
            marks=pytest.mark.nightly,
        ),
        ("MPITRAIN_ALGORITHM", "rign", "there is no allreduce algorithm 'rign'; known: auto, "),
        ("MPITRAIN_COMPRESSION", "int9", "there is no compression 'int9'; known: bf16, "),
    ],
)
def test_a_wrong_variable(variable: str, value: str, message: str) -> None:
    job = run_job(3, INIT.format(""), env={variable: value})
    once(job, f": {message}")
    report_of(job, "ConfigError: rank 0 on ")


def test_a_wrong_variable_in_a_world_of_one() -> None:
    job = run_job(None, INIT.format(""), env={"MPITRAIN_ALGORITM": "ring"})
    failed(job, "ConfigError: rank 0 on ", "did you mean MPITRAIN_ALGORITHM?")


def test_a_wrong_variable_on_one_rank_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INIT.format(""))
    one, two = [PYTHON, str(script)], ["-n", "1", "-env", "MPITRAIN_ALGORITM", "ring", PYTHON, str(script)]
    job = run_command([*mpiexec(2), *one, ":", *two, ":", "-n", "1", *one])
    once(job, "there is no setting MPITRAIN_ALGORITM")
    report_of(job, "ConfigError: rank 2 on ")


def test_a_wrong_variable_with_open_mpi() -> None:
    vendor = need("openmpi")
    once(
        run_job(3, INIT.format(""), env={"MPITRAIN_ALGORITM": "ring"}, launcher=vendor, python=vendor),
        "there is no setting MPITRAIN_ALGORITM",
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("algorithm='ring' if os.environ['PMI_RANK'] == '1' else 'native'", "algorithm='ring'; rank 0 on "),
        ("compression='bf16' if os.environ['PMI_RANK'] == '1' else None", "compression='bf16'; rank 0 on "),
        ("bucket_mib='4' if os.environ['PMI_RANK'] == '1' else 4", "bucket_mib is '4'; it must be a float"),
        ("bucket=4", "there is no setting bucket; did you mean bucket_mib?"),
    ],
)
def test_a_wrong_argument_of_init(argument: str, message: str) -> None:
    once(run_job(3, INIT.format(argument)), message)


def test_an_algorithm_that_one_rank_alone_asks_for() -> None:
    source = (
        BEGIN
        + "from mpitrain.allreduce import make_algorithm\nif rank == 1: make_algorithm(world, 'rign')\nworld.barrier()"
    )
    once(run_job(3, source), "ConfigError: there is no allreduce algorithm 'rign'")


# -- gradients and models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "value"),
    [
        (2, "nan"),
        (5, "inf"),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((2, "inf"), (5, "nan"), (3, "-inf"))),
    ],
)
def test_a_gradient_that_is_no_number(value: str, ranks: int) -> None:
    wrong = f"""
calls = 0
def function(parameters, batch, on_gradient):
    global calls
    calls += 1
    def poisoned(name, gradient):
        if name == "w" and rank == 1 and calls == 3:
            gradient[-1] = float("{value}")
        on_gradient(name, gradient)
    return regression(parameters, batch, poisoned)
"""
    job = train(ranks, wrong)
    once(job, "the gradient of w holds NaN or infinity; nothing was changed by this step")
    report_of(job, "NonFiniteError: rank 1 on ")


def test_a_gradient_that_is_missing_on_one_rank() -> None:
    wrong = """
def function(parameters, batch, on_gradient):
    return regression(parameters, batch, lambda name, g: None if rank == 1 and name == "b" else on_gradient(name, g))
"""
    job = train(3, wrong)
    once(job, "ended its backward pass without the gradient of b")
    report_of(job, "MissingGradientError: rank 1 on ")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("width += rank == 1", "float64 (60, 6); rank 0 on "),
        ("samples += rank == 1", "float64 (61, 5); rank 0 on "),
        ("dtype = ['float64', 'float32', 'float64'][rank]", "float32 (60, 5); rank 0 on "),
        ("global_batch += rank == 1", "global_batch=13 seed=0 shuffle=True; rank 0 on "),
    ],
)
def test_data_that_differ_between_ranks(wrong: str, message: str) -> None:
    job = train(3, wrong)
    once(job, message)
    report_of(job, "MismatchError: rank 1 on ")


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ("(5 + rank,)", "'float64'", "parameter w float64 (6,); rank 0 on "),
        ("(5,)", "['float64', 'float32', 'float16'][rank]", "parameter w float32 (5,); rank 0 on "),
    ],
)
def test_models_that_differ_between_ranks(shape: str, kind: str, message: str) -> None:
    source = f"reducer = mt.GradientReducer(world, [mt.Parameter('w', {shape}, numpy.dtype({kind}))])"
    job = run_job(3, BEGIN + source)
    once(job, message)
    report_of(job, "MismatchError: rank 1 on ")


def test_ranks_with_different_numbers_of_steps() -> None:
    job = train(3, "steps += rank == 1")
    report = report_of(job, "MismatchError: rank 1 on ", " has finished (after ", "the same number of steps?")
    assert report.rank == 1


def test_arrays_whose_dtype_differs_between_ranks() -> None:
    job = run_job(3, BEGIN + "world.mean({'a': numpy.ones(3, 'float32' if rank == 2 else 'float64')})")
    once(job, "['a'] float32 (3,); rank 0 on ")
    report_of(job, "MismatchError: rank 2 on ")


# -- samples and files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [3, pytest.param(5, marks=pytest.mark.nightly)])
def test_more_ranks_than_samples(ranks: int) -> None:
    once(train(ranks, "samples = 2"), f"the data set has 2 samples for {ranks} ranks")


def test_more_ranks_than_samples_in_a_batch() -> None:
    once(train(3, "global_batch = 2"), "global_batch=2 for 3 ranks")
    once(run_job(3, BEGIN + "list(world.shard([numpy.ones((2, 4))]))"), "batch 0 has 2 samples for 3 ranks")


def example(ranks: int, *options: str, folder: Path) -> Job:
    """Run examples/train.py, which must find no data except those in `folder`."""
    command = [*mpiexec(ranks), PYTHON, "examples/train.py", "--device", "host", *options]
    return run_command(command, env={"HOME": str(folder), "XDG_CACHE_HOME": str(folder)})


def test_a_missing_data_file(tmp_path: Path) -> None:
    job = example(3, "--data-directory", str(tmp_path), folder=tmp_path)
    once(job, "train-images-idx3-ubyte.gz cannot be read (No such file or directory)")
    report_of(job, "DataError: ", f"get it with: scripts/get-data fashion {tmp_path}", "--data digits")


def test_a_damaged_data_file(tmp_path: Path) -> None:
    (tmp_path / "fashion").mkdir()
    (tmp_path / "fashion/train-images-idx3-ubyte.gz").write_bytes(b"not an image")
    job = example(3, "--data-directory", str(tmp_path), folder=tmp_path)
    once(job, "train-images-idx3-ubyte.gz is damaged: 12 bytes with SHA-256 ")


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_unknown_option_of_the_example(ranks: int, tmp_path: Path) -> None:
    job = example(ranks, "--lerning-rate", "1", folder=tmp_path)
    failed(job, "error: unrecognized arguments: --lerning-rate 1\n")
    assert job.code == 2, job.output
    assert "left with exit code 2 (train.py:" in job.stderr, job.output  # and not argparse's own line


# Each line is a wrong option. One process tests all of them, because most of its time goes into imports.
WRONG_OPTIONS = """
import runpy, sys
script, *lines = sys.argv[1:]
sys.path.insert(0, script.rpartition("/")[0])
for line in lines:
    sys.argv = [script, *line.split()]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("train.py", ("--steps 0", "--epochs 0", "--global-batch -5", "--global-batch many")),
        ("train_gpt.py", ("--steps 0", "--evaluate-steps 0", "--context 0", "--global-batch 0")),
    ],
)
def test_numbers_of_the_examples_that_must_be_positive(script: str, lines: tuple[str, ...]) -> None:
    job = run_command([PYTHON, "-c", WRONG_OPTIONS, f"examples/{script}", *lines])
    assert job.stdout.split() == ["2"] * len(lines), job.output
    for option, value in (line.split() for line in lines):
        assert f"error: argument {option}: '{value}' is not a whole number above 0\n" in job.stderr, job.output


def test_wrong_options_of_mpitrain_run() -> None:
    run = [PYTHON, "-m", "mpitrain", "run"]
    job = run_command([*run, "-n", "2", "--hots", "examples/train.py"])
    failed(job, "unknown argument --hots")
    assert job.code == 2, job.output
    job = run_command([*run, "-n", "2", "examples/trian.py"])
    failed(job, "mpitrain run: there is no script 'examples/trian.py' in ")
    assert job.code == 2, job.output


def test_what_mpitrain_run_prints_of_a_wrong_variable() -> None:
    # `mpitrain run` itself does not read this setting: the ranks refuse it, and the message comes once.
    command = [PYTHON, "-m", "mpitrain", "run", "-n", "3", "examples/train.py", "--data", "digits"]
    job = run_command(command, env={"MPITRAIN_BUCKETS": "1"})
    failed(job, "there is no setting MPITRAIN_BUCKETS; did you mean MPITRAIN_BUCKET_MIB?")
    # (The message may come again without a rank, after the output of mpiexec.)
    assert job.stderr.count("] mpitrain.errors.ConfigError") == 1, job.output


def test_arrays_on_another_gpu_than_the_ranks() -> None:
    """On all ranks alike. (tests/device_ranks has the case of one rank.) The GPUs are emulated."""
    source = """
import cupy
import mpitrain as mt

world = mt.init()
with cupy.cuda.Device(1):
    elsewhere = cupy.ones(3)
    world.sum({"a": elsewhere})
"""
    paths = os.pathsep.join([str(REPOSITORY / "tests/emulated"), str(REPOSITORY)])
    env = {"PYTHONPATH": paths, "EMULATED_GPUS": "2", "_MPITRAIN_DEVICES": "cuda:0,cuda:0"}
    text = "['a'] float64 (3,) on GPU 1, and this rank has GPU 0; move the array to this rank's GPU, or to the host"
    report_of(run_job(2, source, env=env), f"DeviceError: {text}")
