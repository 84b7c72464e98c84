"""Scripts that do not know of other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.cli.run import is_unaware


@pytest.mark.parametrize(
    ("script", "beside", "unaware"),
    [
        ("import torch\ntorch.save({}, 'best.pt')", "", True),
        ("import json, own", "import numpy", True),
        ("import mpitrain as mt", "", False),
        ("from mpi4py import MPI", "", False),
        ("import own", "import mpitrain.torch", False),
        ("from own import fit", "def fit():\n    from mpitrain import init", False),
        ("import os\nrank = os.environ['PMI_RANK']", "", False),
        ("this is not Python(", "", False),
    ],
)
def test_what_is_told_of(tmp_path: Path, script: str, beside: str, unaware: bool) -> None:
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "own.py").write_text(beside)
    assert is_unaware(tmp_path / "train.py") == unaware


def test_a_package_beside_it(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/__init__.py").touch()
    (tmp_path / "net/fit.py").write_text("import mpitrain")
    (tmp_path / "train.py").write_text("import net")
    assert not is_unaware(tmp_path / "train.py")
