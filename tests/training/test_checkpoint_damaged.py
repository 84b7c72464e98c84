"""Damage to the files of a checkpoint is found, and the latest whole checkpoint is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain.errors import CheckpointError
from mpitrain.state import latest, load, save
from mpitrain.state.manifest import read_manifest
from mpitrain.state.store import TENSORS, entries, verify

STATE = {"a": {"b": numpy.arange(6.0).reshape(2, 3)}, "n": 1, "text": "x", "none": None, "list": [1, 2.5]}


@pytest.mark.parametrize("name", [TENSORS, "manifest.json"])
def test_any_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    """A bit in the white space of the manifest is an exception: it has no meaning."""
    path = save(tmp_path, 7, STATE)
    whole = (path / name).read_bytes()
    expected = repr(load(path))
    found = 0
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        (path / name).write_bytes(content)
        try:
            assert repr(load(path)) == expected
            assert whole[place : place + 1].isspace()
        except CheckpointError as error:
            assert str(path) in str(error)
            found += 1
    assert found >= 0.75 * len(whole)


@pytest.mark.parametrize("name", [TENSORS, "manifest.json"])
def test_any_truncated_file_is_found(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 7, STATE)
    whole = (path / name).read_bytes()
    for length in range(0, len(whole) - 1, 7):
        (path / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=name):
            verify(path)


def test_a_manifest_of_another_format(tmp_path: Path) -> None:
    path = save(tmp_path, 7, STATE)
    text = (path / "manifest.json").read_text()
    content = json.loads(text)["manifest"] | {"format": 2}
    from mpitrain.state.manifest import _checksum

    (path / "manifest.json").write_text(json.dumps({"manifest": content, "sha256": _checksum(content)}))
    with pytest.raises(CheckpointError, match=r"has format 2; this version of mpitrain reads 1"):
        read_manifest(path)


def test_the_latest_is_the_one_with_a_whole_manifest(tmp_path: Path) -> None:
    assert latest(tmp_path / "not there") is None
    assert latest(tmp_path) is None
    for name in ("step-00000900", "step-x", ".writing-step-00000200-1", "step-7"):
        (tmp_path / name).mkdir()
    for step in (9, 100, 123_456_789):
        save(tmp_path, step, STATE)
    assert latest(tmp_path) == tmp_path / "step-123456789"
    (tmp_path / "step-123456789/manifest.json").unlink()
    (tmp_path / "step-00000100").rename(tmp_path / "step-00000101")
    assert latest(tmp_path) == tmp_path / "step-00000009"
    problems = {entry.step: entry.problem for entry in entries(tmp_path)}
    assert list(problems) == [123_456_789, 900, 101, 9]
    assert problems[101] == f"{tmp_path}/step-00000101 holds step 100; was it renamed?"
    assert problems[900] == f"{tmp_path}/step-00000900 has no manifest.json; it is incomplete, or not a checkpoint"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("values", [1], "values is a list; it must be a dict"),
        ("values", None, "values is a NoneType; it must be a dict"),
        ("step", "5", "step is a str; it must be a int"),
        ("step", -5, "step is -5, parts is 0; allowed are 0 or more, and 0 to 1048576"),
        ("parts", 10**20, f"step is 5, parts is {10**20}; allowed are 0 or more, and 0 to 1048576"),
        ("score", "1", "score is '1'; it must be a number"),
        ("score", 10**400, f"score is {str(10**400)[:80]}; it must be a number"),
        ("files", {"a": {"bytes": 10**400, "sha256": ""}}, f"a has {str(10**400)[:80]} bytes and the checksum ''"),
        ("information", {"loss": "low"}, "loss is 'low'; it must be a number"),
        ("files", {"a\0b": {"bytes": 1, "sha256": ""}}, "'a\\x00b' is a file; allowed is a name without folders"),
        ("files", {"../a": {"bytes": 1, "sha256": ""}}, "'../a' is a file; allowed is a name without folders"),
        ("files", {"a": {"bytes": "1", "sha256": ""}}, "a has '1' bytes and the checksum ''"),
    ],
)
def test_a_manifest_with_other_values(tmp_path: Path, name: str, value: Any, why: str) -> None:
    """The manifest has the right checksum, so no disk has damaged it."""
    path = save(tmp_path, 5, {"x": numpy.ones(3)})
    content = json.loads((path / "manifest.json").read_text())["manifest"] | {name: value}
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"manifest": content, "sha256": checksum}))
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: manifest.json is damaged: {why}"
