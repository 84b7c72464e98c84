"""The record of a run that `mpitrain verify` compares: written, read and damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import records

from jobs import run_command
from mpitrain.errors import DataError
from mpitrain.verify.record_file import make_record, opened, read_record


@pytest.mark.parametrize("content", [None, '{"num_ranks": 1}\n{"number": 1, "ki'], ids=["none", "cut off"])
def test_a_record_that_is_not_whole(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "record.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"there is no complete record in .* --directory with a folder"):
        read_record(tmp_path)


def test_a_record_that_nobody_has_begun(tmp_path: Path) -> None:
    make_record(tmp_path)
    with pytest.raises(DataError, match=r"^the script made no World, so there is nothing to compare"):
        read_record(tmp_path)


def written(folder: Path, content: list[Any]) -> Path:
    (folder / "record.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in content))
    return folder


def plain() -> list[Any]:
    """The plain text of a record file."""
    return [{"num_ranks": 2}, *(dataclasses.asdict(entry) for entry in records()[1].lines)]


def test_a_record_comes_back(tmp_path: Path) -> None:
    assert read_record(written(tmp_path, plain())) == records()[1]


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ((0, "num_ranks"), "2", "num_ranks is '2'; it must be a number of ranks"),
        ((0, "num_ranks"), 0, "num_ranks is 0; it must be a number of ranks"),
        ((0,), {}, "it has no 'num_ranks'"),
        ((0,), [1], "line 1 is damaged: it must be an object, {...}, and is [1]"),
        ((1,), None, "line 2 is damaged: it must be an object, {...}, and is None"),
        ((1, "more"), 1, "Line.__init__() got an unexpected keyword argument 'more'"),
        ((2, "number"), 7, "line 3 is of call 7, kind 'step', dtype 'float32'"),
        ((2, "kind"), "sums", "line 3 is of call 2, kind 'sums', dtype 'float32'"),
        ((2, "precision"), None, "line 3 is of call 2, kind 'step', dtype None"),
        ((2, "weights"), [1.0, -1.0], "line 3 has the weights [1.0, -1.0]; they must be 0 or more"),
        ((2, "weights"), [True], "True is not a number"),
        ((2, "samples"), [[1]], "line 3 has samples that are not hashes"),
        ((2, "loss"), "1", "'1' is not a number"),
        ((2, "learning_rate"), 10**400, "int too large to convert to float"),
        ((2, "metrics"), [1], "'list' object has no attribute 'items'"),
        ((2, "tensors"), None, "'NoneType' object has no attribute 'items'"),
        ((2, "tensors", "w"), {}, "it has no 'count'"),
        ((1, "before", "w"), {}, "it has no 'count'"),
        ((2, "parameters", "w"), {}, "it has no 'count'"),
        ((2, "tensors", "w", "count"), -1, "w has -1 elements and 8 projections, not 8"),
        ((2, "tensors", "w", "projections"), [1.0], "w has 600 elements and 1 projections, not 8"),
        ((2, "tensors", "w", "dtype"), ["float32"], "w has the dtype ['float32']"),
    ],
)
def test_a_record_with_other_values(tmp_path: Path, place: tuple[Any, ...], value: Any, why: str) -> None:
    content: Any = plain()
    at = content
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(DataError) as caught:
        read_record(written(tmp_path, content))
    said = str(caught.value)
    assert said.startswith(f"there is no complete record in {tmp_path}: ")
    assert f": {why}. Rank 0 writes the record on its host. If that is another host, " in said


def test_a_record_of_brackets(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("[" * 200_000)
    with pytest.raises(DataError, match="it is nested too deeply"):
        read_record(tmp_path)


def test_the_file_is_the_launchers(tmp_path: Path) -> None:
    make_record(tmp_path)
    status = (tmp_path / "record.jsonl").lstat()
    assert (stat.filemode(status.st_mode), status.st_size) == ("-rw-------", 0)
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "record.jsonl").unlink()
    (tmp_path / "record.jsonl").symlink_to("precious")
    make_record(tmp_path)  # replaces the link, and does not write through it
    assert not (tmp_path / "record.jsonl").is_symlink()
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("link", "is a link"),
        ("hard link", "is -rw-------, owner {owner}, 2 links"),
        ("mode", "is -rw-r--r--, owner {owner}, 1 links"),
        ("fifo", "cannot be opened (No such device or address)"),
        ("folder", "cannot be opened (Is a directory)"),
    ],
)
def test_a_rank_writes_into_no_other_file(tmp_path: Path, kind: str, problem: str) -> None:
    """The environment of a rank may name any file of the user."""
    make_record(tmp_path)
    record, precious = tmp_path / "record.jsonl", tmp_path / "precious"
    record.rename(precious)
    precious.write_text("mine")
    if kind == "link":
        record.symlink_to("precious")
    elif kind == "hard link":
        record.hardlink_to(precious)
    elif kind == "mode":
        precious.rename(record)
        record.chmod(0o644)
        precious = record
    elif kind == "fifo":
        os.mkfifo(record, 0o600)
    else:
        record.mkdir()
    said = (
        f"the record {record} {problem.format(owner=os.geteuid())}. It must be the file that mpitrain verify has made"
    )
    with pytest.raises(OSError, match="the record") as caught:
        opened(tmp_path)
    assert said in str(caught.value)
    if kind == "link":
        source = "import mpitrain as mt; world = mt.init(); world.mean(1.0); print('it continued')"
        environment = {"_MPITRAIN_VERIFY_RECORD": str(tmp_path), "_MPITRAIN_VERIFY_STEPS": "1"}
        job = run_command([sys.executable, "-c", source], env=environment)
        assert (job.code, job.stdout) == (1, "") and said in job.stderr, job.output
    assert precious.read_text() == "mine"
