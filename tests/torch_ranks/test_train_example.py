"""examples/train.py --framework torch: the file of the model differs, the training does not."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy
import pytest

from mpitrain import World
from tests.ranks.common import assert_same_bits

from .common import nightly

SCRIPT = Path(__file__).parents[2] / "examples/train.py"


STEPS = 12  # an epoch: 11 batches of 128 samples and one of 34


def run(monkeypatch: pytest.MonkeyPatch, *options: str, steps: int = STEPS) -> None:
    """The script in this job."""
    command = [str(SCRIPT), "--data", "digits", "--device", "host", "--steps", str(steps), *options]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(SCRIPT), run_name="__main__")


def losses(world: World, record: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> numpy.ndarray:
    """The losses in the record of a run."""
    run(monkeypatch, *options, "--run", str(record))
    world.barrier()
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    return numpy.array([row["loss"] for row in rows if "loss" in row])


@pytest.mark.parametrize("model", ["mlp", *nightly("cnn")])
def test_torch_trains_as_numpy_does(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """From the same parameters, so every loss is equal but for float32's roundings."""
    pytest.importorskip("sklearn")
    found = losses(world, shared / "torch", monkeypatch, "--model", model, "--framework", "torch")
    shown = capsys.readouterr().out
    expected = losses(world, shared / "numpy", monkeypatch, "--model", model)
    assert len(found) == 2  # of steps 10 and 12
    numpy.testing.assert_allclose(found, expected, rtol=1e-5)
    assert_same_bits(world, found)
    if world.is_root:
        assert f"ranks: {world.size}, nodes: 1, {model} on torch, digits" in shown
        assert f"step {STEPS}: test accuracy" in shown


def test_checkpoints_of_the_example(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of another precision continues too."""
    pytest.importorskip("sklearn")
    options = ("--framework", "torch", "--checkpoints", str(shared))
    run(monkeypatch, *options, "--precision", "bf16")
    run(monkeypatch, *options, steps=STEPS + 2)
    if world.is_root:
        assert f"resumed from {shared}/step-{STEPS:08d} at step {STEPS}\n" in capsys.readouterr().out
