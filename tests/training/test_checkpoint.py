"""Checkpoints on disk, one process: each is whole or not there, and damage is found."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mpitrain.errors import CheckpointError
from mpitrain.state import latest, load, save, tensors
from mpitrain.state.manifest import File, Manifest, read_manifest
from mpitrain.state.names import join, split
from mpitrain.state.resume import part_name, read_part
from mpitrain.state.store import TENSORS, entries, half_written, prune, verify, write
from mpitrain.training.hooks.checkpoint import BackgroundWriter, HostCopies


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.integers())
NESTED = st.recursive(VALUES, lambda inner: st.dictionaries(st.text(), inner, min_size=1), max_leaves=8)


def test_the_part_of_another_training_is_not_read(tmp_path: Path) -> None:
    """An earlier training in this directory had as many ranks, and its last parts were of the same step."""
    for rank, run in ((0, "this"), (1, "earlier")):
        content = {"residual/w": numpy.full(2, rank, "f4")}
        write(tmp_path, part_name(7, rank, 2), Manifest(7, run=run), content)
    manifest = Manifest(7, run="this", parts=2)
    assert read_part(tmp_path, manifest, 0)["residual"]["w"].tolist() == [0, 0]
    with pytest.raises(CheckpointError, match="part-1-of-2 belongs to another training than the checkpoint of that"):
        read_part(tmp_path, manifest, 1)


@given(st.dictionaries(st.text(), NESTED, min_size=1))
@settings(max_examples=50)
def test_names_are_kept_whatever_they_hold(state: dict[str, Any]) -> None:
    tensors, values = split(state)
    assert tensors == {}
    assert join(json.loads(json.dumps(values))) == state


def test_arrays_of_every_kind_come_back(tmp_path: Path) -> None:
    """Arrays come back, even if the library's front end would write them in the wrong order."""
    square = numpy.arange(12.0, dtype="f4").reshape(3, 4)
    state = {
        "layer/1": {"100%": square.T, "fortran": numpy.asfortranarray(square), "strided": square[:, ::2]},
        "scalar": numpy.array(3.5),
        "empty": numpy.zeros((0, 3), "i8"),
        "bf16": numpy.arange(5).astype(ml_dtypes.bfloat16),
        "bool": numpy.array([True, False]),
        "f16": numpy.ones(3, "f2"),
    }
    found = load(save(tmp_path, 7, state))
    for group, expected in ((found["layer/1"], state.pop("layer/1")), (found, state)):
        for name, value in expected.items():
            assert (group[name].dtype, group[name].shape) == (value.dtype, value.shape), name
            assert group[name].tobytes() == value.tobytes(), name
            assert group[name].flags.writeable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (numpy.float32(1), "a/n is a float32 "),
        ({1, 2}, "a/n is a set "),
        (b"bytes", "a/n is a bytes "),
        (numpy.ones(2, complex), "a/n is an array of complex128; a checkpoint holds arrays of bool, "),
        (numpy.ones(2, ">f4"), "a/n is an array of >f4"),
        (numpy.array(["a"]), "a/n is an array of <U1"),
        ({1: 2}, "a/n/ has the key 1"),
    ],
    ids=repr,
)
def test_a_state_that_cannot_be_written_leaves_nothing(tmp_path: Path, value: Any, text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 7, {"a": {"n": value}})
    assert str(caught.value).startswith(text)
    assert names_in(tmp_path) == []


def test_a_checkpoint_is_replaced_and_remains_of_killed_processes_are_cleared(tmp_path: Path) -> None:
    for name in (
        f".writing-step-00000007-{os.getpid()}",
        ".writing-step-00000003-1",
        ".replaced-step-00000007-1",
        ".removing-step-00000001-1",
        ".writing-step-00000003.part-1-of-4-1",  # of another writer
        "mine",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / TENSORS).write_text("half")
    for value in (1, 2):
        path = save(tmp_path, 7, {"n": value})
    assert load(path) == {"n": 2}
    assert names_in(tmp_path) == [".writing-step-00000003.part-1-of-4-1", "mine", "step-00000007"]
    assert half_written(tmp_path) == [tmp_path / ".writing-step-00000003.part-1-of-4-1"]


def test_a_failed_replacement_keeps_the_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 7, {"n": 1})
    rename, calls = Path.rename, []

    def failing(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:  # the first moves the old one away
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 7, {"n": 2})
    assert names_in(tmp_path) == ["step-00000007"]
    assert load(tmp_path / "step-00000007") == {"n": 1}


def test_a_run_killed_between_the_renames_loses_nothing_at_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 7, {"n": 1}).rename(tmp_path / ".replaced-step-00000007-1")
    save(tmp_path, 8, {"n": 2})
    assert [load(tmp_path / name) for name in names_in(tmp_path)] == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("piece_bytes", [16, 100, 4096, tensors._PIECE_BYTES])
def test_arrays_are_written_as_the_library_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(tensors, "_PIECE_BYTES", piece_bytes)
    random = numpy.random.default_rng(0)
    arrays = {
        f"{dtype} {shape}": random.integers(0, 2, shape).astype(dtype)
        for dtype in tensors.NAMES
        for shape in ((), (0,), (3, 0), (1,), (15,), (16,), (17, 3), (5, 20))
    }
    arrays |= {"Fortran": numpy.asfortranarray(random.random((7, 5))), "strided": random.random((9, 8))[::2, 1::3]}
    arrays |= {'Umlaut ä " \\': numpy.arange(3)}
    file = tmp_path / "file"
    about = tensors.write_tensors(file, arrays)
    assert about == File(len(file.read_bytes()), hashlib.sha256(file.read_bytes()).hexdigest())
    found = load_file(file)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    assert all(header[name]["data_offsets"][0] % array.itemsize == 0 for name, array in arrays.items())


def test_directories_are_synced_before_what_depends_on_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(descriptor: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    save(tmp_path / "new" / "folder", 7, {"n": 1})
    temporary = f".writing-step-00000007-{os.getpid()}"
    assert events == [
        f"sync {tmp_path.name}",
        "sync new",
        f"sync {TENSORS}",
        "sync manifest.json",
        f"sync {temporary}",
        f"rename {temporary}",
        "sync folder",
    ]


def with_score(directory: Path, step: int, score: float | None) -> None:
    write(directory, f"step-{step:08d}", Manifest(step, "run", score), {})


def test_what_is_kept(tmp_path: Path) -> None:
    for step, score in ((1, None), (2, 5.0), (3, 7.0), (4, 7.0), (5, float("nan")), (6, 1.0), (9, None)):
        with_score(tmp_path, step, score)
    (tmp_path / "step-00000008").mkdir()  # damaged, so nobody may remove it
    # 9 could not be read when this job began; it continued from 5.
    prune(tmp_path, 2, {5, 6})
    assert names_in(tmp_path) == [f"step-0000000{step}" for step in (4, 5, 6, 8)]
    prune(tmp_path, 9, {6})
    assert names_in(tmp_path) == [f"step-0000000{step}" for step in (4, 5, 6, 8)]


def test_buffers_are_copies_and_used_again() -> None:
    buffers = HostCopies()
    arrays = {"a": numpy.arange(6.0).reshape(2, 3).T, "b": numpy.ones(2, ml_dtypes.bfloat16)}
    first = buffers.copy(arrays)
    expected = {name: value.tobytes() for name, value in arrays.items()}
    arrays["a"][:] = 0
    assert {name: value.tobytes() for name, value in first.items()} == expected
    second = buffers.copy(arrays)
    assert all(second[name] is first[name] for name in arrays)
    assert buffers.copy({"a": numpy.ones(4)})["a"].tolist() == [1, 1, 1, 1]


def test_a_writer_reports_and_goes_on() -> None:
    said: list[str] = []
    writer = BackgroundWriter(said.append)
    assert not writer.is_busy
    go = threading.Event()

    def waits() -> None:
        go.wait()

    def fails() -> None:
        raise CheckpointError("no room")

    def finish(work: Callable[[], None]) -> None:
        writer.start("writing", work)
        go.set()
        while writer.is_busy:
            pass

    writer.start("writing x", waits)
    assert writer.is_busy
    assert writer.doing == "writing x"
    go.set()
    while writer.is_busy:
        pass
    assert writer.failed is None
    finish(fails)
    assert str(writer.failed) == "no room"
    assert said == ["no room"]
    finish(lambda: None)
    assert writer.failed is None


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
