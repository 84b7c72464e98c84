"""`mpitrain checkpoint`: what it lists, shows, verifies and exports, and its exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
from safetensors.numpy import load_file

from mpitrain.cli import main
from mpitrain.state.manifest import Manifest
from mpitrain.state.names import split
from mpitrain.state.resume import part_name
from mpitrain.state.store import TENSORS, name_of, write

PARAMETERS = {"file": numpy.arange(6, dtype="f4").reshape(2, 3), "layer/1.bias": numpy.ones(2, "f4")}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three checkpoints; the newest has two parts."""
    for step, score in ((9, None), (100, 0.5), (200, 0.25)):
        state = {"step": step, "adapter": {"parameters": {name: value + step for name, value in PARAMETERS.items()}}}
        tensors, values = split(state)
        about = {"saved": "2026-01-02T03:04:05Z", "ranks": 4, "loss": 0.125, "hosts": ["a", "b"]}
        parts = 2 if step == 200 else 0
        write(tmp_path, name_of(step), Manifest(step, "run7", score, parts, values, information=about), tensors)
    for rank in range(2):
        write(tmp_path, part_name(200, rank, 2), Manifest(200, "run7"), {"residual/w": numpy.zeros(3, "f4")})
    return tmp_path


def damage(path: Path) -> None:
    content = bytearray((path / TENSORS).read_bytes())
    content[-1] ^= 4
    (path / TENSORS).write_bytes(content)


def test_ls(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(runs)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step          saved (UTC)   MB  ranks   loss  score",
        " 200  2026-01-02 03:04:05  0.0      4  0.125   0.25",
        " 100  2026-01-02 03:04:05  0.0      4  0.125    0.5",
        "   9  2026-01-02 03:04:05  0.0      4  0.125",
    ]
    (runs / "step-00000100" / "manifest.json").unlink()
    assert main(["checkpoint", "ls", str(runs)]) == 1
    assert f"damaged: {runs}/step-00000100 has no manifest.json" in capsys.readouterr().out


def test_show_takes_the_newest_that_is_whole(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(runs / "step-00000200")
    assert main(["checkpoint", "show", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{runs}/step-00000100"
    shown = dict(line.split(maxsplit=1) for line in lines[1:])
    assert shown["training"] == "run7"
    assert shown["hosts"] == "a b"
    assert shown["adapter/parameters/file"] == "F32 (2, 3)"
    assert shown["adapter/parameters/layer%2F1.bias"] == "F32 (2,)"
    assert lines[-1].split() == ["step", "100"]


def test_verify(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(runs)]) == 0
    names = [
        "step-00000200",
        "step-00000200.part-0-of-2",
        "step-00000200.part-1-of-2",
        "step-00000100",
        "step-00000009",
    ]
    assert capsys.readouterr().out.splitlines() == [f"{runs}/{name}: whole" for name in names]
    damage(runs / "step-00000200.part-1-of-2")
    assert main(["checkpoint", "verify", str(runs)]) == 1
    text = "is damaged: its content does not have the checksum of the manifest"
    assert f"damaged: {runs}/step-00000200.part-1-of-2/{TENSORS} {text}\n" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(runs / "step-00000100")]) == 0
    assert capsys.readouterr().out == f"{runs}/step-00000100: whole\n"


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_export(runs: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = runs / f"model.{kind}"
    file.write_text("an older one")
    assert main(["checkpoint", "export", str(runs), str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 2 parameters, 8 numbers, of step 200\n"
    found = dict(numpy.load(file)) if kind == "npz" else load_file(file)
    assert found.keys() == PARAMETERS.keys()
    for name, value in PARAMETERS.items():
        numpy.testing.assert_array_equal(found[name], value + 200)
    assert not list(runs.glob(".writing*"))


def test_what_cannot_be_exported(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, code, text in (
        (runs / "model.pt", 2, f"{runs}/model.pt ends in .pt; it must be .safetensors or .npz"),
        (runs / "no" / "model.npz", 1, f"cannot write {runs}/no/model.npz: "),
        (runs / "no" / "model.safetensors", 1, f"cannot write {runs}/no/model.safetensors: "),
    ):
        assert main(["checkpoint", "export", str(runs), str(file)]) == code
        assert capsys.readouterr().err.startswith(f"mpitrain checkpoint: {text}")
    tensors, values = split({"adapter": {"parameters": {"w": numpy.ones(2, ml_dtypes.bfloat16)}}})
    write(runs, name_of(300), Manifest(300, values=values), tensors)
    (runs / "model.npz").write_text("an older one")
    assert main(["checkpoint", "export", str(runs), str(runs / "model.npz")]) == 2
    assert "w is bfloat16, which NumPy's files cannot hold; export to .safetensors" in capsys.readouterr().err
    assert (runs / "model.npz").read_text() == "an older one"
    write(runs, name_of(400), Manifest(400), {})
    assert main(["checkpoint", "export", str(runs), str(runs / "model.npz")]) == 1
    assert f"{runs}/step-00000400 holds no parameters; was it written by a Trainer?" in capsys.readouterr().err


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, as other languages read it, which know no NaN and no infinity."""
    tensors, values = split({"step": 300, "adapter": {"parameters": {"w": numpy.ones((8, 64))}}, "list": [math.inf]})
    write(
        runs, name_of(300), Manifest(300, "run7", None, 0, values, information={"loss": math.nan, "ranks": 1}), tensors
    )
    damage(runs / "step-00000100")
    (runs / "step-00000009/manifest.json").unlink()

    def said(action: str, code: int) -> dict[str, Any]:
        assert main(["checkpoint", action, "--json", str(runs)]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        return found

    listed = said("ls", 1)
    assert [(one["step"], one.get("ranks"), one["loss"]) for one in listed["checkpoints"]] == [
        (300, 1, "NaN"), (200, 4, 0.125), (100, 4, 0.125),
    ]  # fmt: skip
    assert len(listed["damaged"]) == 1 and "step-00000009" in str(listed["damaged"])
    shown = said("show", 0)
    assert (shown["step"], shown["loss"]) == (300, "NaN") and "Infinity" in json.dumps(shown["values"])
    assert shown["tensors"]["adapter/parameters/w"]["shape"] == [8, 64]
    verified = said("verify", 1)
    assert verified["whole"][0] == listed["checkpoints"][0]["path"] == str(runs / "step-00000300")
    assert len(verified["damaged"]) == 2


@pytest.mark.parametrize("action", ["ls", "show", "verify"])
def test_nothing_there(tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", action, str(tmp_path)]) == 1
    assert f"mpitrain checkpoint: there are no checkpoints in {tmp_path}" in capsys.readouterr().err
    assert main(["checkpoint", action, str(tmp_path / "x")]) == 1
    assert f"mpitrain checkpoint: {tmp_path}/x does not exist, or is not a directory" in capsys.readouterr().err


def test_all_are_damaged(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in runs.glob("step-*"):
        damage(path)
    assert main(["checkpoint", "show", str(runs)]) == 1
    said = capsys.readouterr().err
    assert all(f"step-{step:08d}/{TENSORS} is damaged" in said for step in (9, 100, 200))
