"""The notebooks of docs/notebooks are run, and print what they show.

A cell with the tag "varies" must only run: its output depends on the machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS, NO_STALLS, REPOSITORY, clean_environment

nbclient = pytest.importorskip("nbclient", reason="the extra notebooks is not installed")
import nbformat  # noqa: E402 - a part of nbclient

NOTEBOOKS = sorted((REPOSITORY / "docs/notebooks").glob("*.ipynb"))
SLOW = ("plan",)  # it measures the machine for some seconds


@pytest.mark.filterwarnings("default")  # of Jupyter's own modules
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.nightly] if path.stem in SLOW else []) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    shown = nbformat.read(path, as_version=4)
    nbformat.validate(shown)
    book = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    limits = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), int(HANG_SECONDS))
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        **NO_STALLS,
    }
    client = nbclient.NotebookClient(book, kernel_name="python3", resources=resources, **limits)
    client.execute(env=clean_environment(environment))
    assert len(book.cells) == len(shown.cells) > 0
    for cell, wanted in zip(book.cells, shown.cells, strict=True):
        if "varies" not in cell.metadata.get("tags", []):
            assert printed(cell) == printed(wanted), cell.source
        else:
            assert printed(cell), cell.source


def printed(cell: Any) -> str:
    return "".join(output["text"].replace("\r\n", "\n") for output in cell.get("outputs", []))
