"""--json prints JSON, whatever a job or a checkpoint has: JSON has no NaN and no infinity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy
import pytest

from mpitrain.cli import main
from mpitrain.launch.jobs import RunningJob
from mpitrain.state.manifest import Manifest
from mpitrain.state.names import split
from mpitrain.state.store import name_of, write


def strict(text: str) -> Any:
    """Read JSON as other languages do; Python alone takes NaN."""

    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_metric_that_is_not_finite(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"loss": math.nan, "norm": math.inf, "least": -math.inf, "rate": 0.1}
    record = SimpleNamespace(step=3, metrics=metrics, status="", steering=False)
    view: Any = SimpleNamespace(record=record, host="a", state="R", seconds=0.0)
    job = RunningJob("1a2b3c4d", since=1.5, ranks={0: view}, launcher="a 1", is_launched=True)
    monkeypatch.setattr("mpitrain.launch.jobs.find_all", lambda _placement: ([job], [], {}))
    assert main(["ps", "--hosts", "localhost", "--json"]) == 0
    (one,) = strict(capsys.readouterr().out)["jobs"]
    assert one["metrics"] == {"loss": "NaN", "norm": "Infinity", "least": "-Infinity", "rate": 0.1}


def test_a_loss_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, values = split({"step": 1, "adapter": {"parameters": {"w": numpy.ones(1)}}, "list": [math.inf]})
    write(tmp_path, name_of(1), Manifest(1, "run7", None, 0, values, information={"loss": math.nan}), tensors)
    assert main(["checkpoint", "ls", "--json", str(tmp_path)]) == 0
    assert strict(capsys.readouterr().out)["checkpoints"][0]["loss"] == "NaN"
    assert main(["checkpoint", "show", "--json", str(tmp_path)]) == 0
    shown = strict(capsys.readouterr().out)
    assert shown["loss"] == "NaN" and "Infinity" in json.dumps(shown["values"])
