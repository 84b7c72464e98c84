"""Documents of runs, whole and damaged, and the record of a loop without a Trainer."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jobs import run_job
from mpitrain.errors import DataError
from mpitrain.training.run_document import DONE, MOST_BYTES, RunDocument, _commit, read_document
from mpitrain.training.writers.json_lines import read_rows
from mpitrain.writers import JsonLines

DOCUMENT = RunDocument(
    job="1a2b3c4d",
    script="train.py",
    arguments=["--lr", "0.1"],
    folder="/home/a",
    hosts={"a": [0, 1], "b": [2]},
    strategy="Sync",
    settings={"algorithm": "ring"},
    python="3.11.7",
    packages={"numpy": "2.0.0"},
    commit="0123abcd",
    is_changed=True,
    process="a 1 2",
    after_step=0,
    first_started=1.5,
    started=2.5,
)


def test_a_document_comes_back(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path)
    writer.open(0)
    writer.describe(DOCUMENT)
    assert read_document(tmp_path / "run.json") == DOCUMENT
    later = dataclasses.replace(DOCUMENT, after_step=7, first_started=9.5, started=9.5, end="done", ended=10.5)
    writer.describe(later)
    writer.close()
    assert read_document(tmp_path / "run.json") == dataclasses.replace(later, first_started=1.5)
    writer.describe(dataclasses.replace(later, after_step=0))
    assert read_document(tmp_path / "run.json").first_started == 9.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "is of version 2; this mpitrain reads up to 1. Update mpitrain"),
        ({"version": 2, "new": 1}, "is of version 2"),
        ({"version": "x"}, "version is 'x'"),
        ({"new": 1}, "it has 'new', which is not known"),
        ({"hosts": ["a"]}, "hosts is"),
        ({"hosts": {"a": 1}}, "hosts is"),
        ({"started": "now"}, "started is 'now'"),
        ({"job": None}, "job is None"),
    ],
)
def test_what_is_no_document(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(dataclasses.asdict(DOCUMENT) | change))
    with pytest.raises(DataError, match=text):
        read_document(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"{}", b"[" * 10**5, b" " * (MOST_BYTES + 1)])
def test_what_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"run\.json (is not the document of a run|is too large)"):
        read_document(path)


def test_every_place_at_which_a_document_may_end(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    content = DOCUMENT.text().rstrip().encode()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError):
            read_document(path)


def test_the_commit_of_a_work_tree(tmp_path: Path) -> None:
    assert _commit(tmp_path) == ("", False)
    assert _commit(tmp_path / "missing") == ("", False)
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(tmp_path)}
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def git(*words: str) -> str:
        line = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(line, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "train.py").write_text("1\n")
    git("add", "train.py")
    git("commit", "-q", "-m", "one")
    assert _commit(tmp_path) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "notes").write_text("untracked\n")
    assert _commit(tmp_path)[1] is False
    (tmp_path / "train.py").write_text("2\n")
    assert _commit(tmp_path) == (git("rev-parse", "HEAD"), True)


LOOP = """
import sys, numpy
import mpitrain as mt
record = mt.record_loop(sys.argv[3], after_step=int(sys.argv[1]))
for step in range(int(sys.argv[1]) + 1, 6):
    loss = mt.init().mean(numpy.float64(step + mt.init().rank))
    record(step, loss=loss, accuracy=numpy.array(0.5))
from mpitrain.watching import activity, rank_record
shown = rank_record.read_record(f"/proc/self/fd/{activity.own_activity().descriptor}", mt.init().rank)
assert shown.step == 5, shown  # on all ranks, for ps and top
for name in ("", "seconds"):
    try:
        record(6, **{name: 1.0})
    except mt.errors.ConfigError as error:
        assert "a printable name other than step and seconds" in str(error)
    else:
        raise AssertionError(name)
if sys.argv[2]:
    record(6, **{"no number": "x"})
"""


@pytest.mark.parametrize("fault", ["", "x"])
def test_rows_of_a_loop(tmp_path: Path, fault: str) -> None:
    for after_step in (0, 3):
        job = run_job(2, LOOP, str(after_step), fault, str(tmp_path / "first"))
        assert (job.code == 0) == (not fault), job.output
        rows = read_rows(tmp_path / "first/metrics.jsonl")
        assert [(row["step"], row["loss"], row["accuracy"]) for row in rows] == [
            (step, step + 0.5, 0.5) for step in range(1, 6)
        ]
        document = read_document(tmp_path / "first/run.json")
        assert document.after_step == after_step
        assert document.end == (DONE if not fault else "")
    if fault:
        assert "the metric 'no number' of step 6 is 'x'; it is not a number" in job.stderr
