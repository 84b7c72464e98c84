"""The index says what the records say, whatever happens to them or to itself."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
from records_made import DOCUMENT, lines, make_record, rows_made

from mpitrain.dashboard.index import RunIndex
from mpitrain.dashboard.record_reader import ReadMark, find_records, read_on, run_id


def points(index: RunIndex, id_: str, name: str) -> tuple[Any, Any]:
    """All steps and values of a metric."""
    whole = index.curve(id_, name, -math.inf, math.inf, 10**6)
    return whole.steps, whole.values


def series_of(rows: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    having = [row for row in rows if name in row]
    return [float(row["step"]) for row in having], [float(row[name]) for row in having]


def assert_has(index: RunIndex, folder: Path, rows: list[dict[str, Any]]) -> None:
    """The index has these rows of the record in `folder`, and no others."""
    run = index.run(run_id(folder))
    assert run is not None
    assert run.num_rows == len(rows)
    assert run.last == (rows[-1] if rows else {})
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    assert run.names == names
    for name in (*names, "missing"):
        steps, values = points(index, run.id, name)
        assert (steps.tolist(), values.tolist()) == series_of(rows, name)


@pytest.fixture
def index(tmp_path: Path) -> Any:
    made = RunIndex(tmp_path / "cache/a/index.sqlite")
    yield made
    made.close()


@pytest.mark.parametrize("count", [0, 1, 5, 4095, 4096, 4097, 8200])
def test_a_record_that_grows(tmp_path: Path, index: RunIndex, count: int) -> None:
    """Taken in at once and by and by: the pieces of the index have 4096 rows."""
    rows = rows_made(1, count)
    folder = make_record(tmp_path / "runs/a", rows[: count // 2])
    assert index.update(folder)
    assert_has(index, folder, rows[: count // 2])
    for begin in (count // 2, count // 2 + 1):
        more = rows[begin : count // 2 + 1] if begin == count // 2 else rows[begin:]
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(lines(more))
        assert index.update(folder) == bool(more)
    assert_has(index, folder, rows)
    assert not index.update(folder)
    whole = RunIndex(tmp_path / "whole.sqlite")
    whole.update(folder)
    assert_has(whole, folder, rows)
    assert whole.run(run_id(folder)) == index.run(run_id(folder))
    whole.close()


def test_every_place_at_which_a_file_may_end(tmp_path: Path, index: RunIndex) -> None:
    """A line without its end is not there yet; the next look reads it whole."""
    rows = rows_made(1, 4)
    content = lines(rows).encode()
    folder = make_record(tmp_path / "a")
    for length in range(len(content) + 1):
        (folder / "metrics.jsonl").write_bytes(content[:length])
        index.update(folder)
        assert_has(index, folder, rows[: content[:length].count(b"\n")])
        run = index.run(run_id(folder))
        assert run is not None and run.problems == []


@pytest.mark.parametrize("kept", [0, 3, 9])
def test_a_record_that_a_resumed_run_has_cut(tmp_path: Path, index: RunIndex, kept: int) -> None:
    """It is longer than before, and its rows are others."""
    folder = make_record(tmp_path / "a", rows_made(1, 10))
    index.update(folder)
    rows = rows_made(1, kept) + [{**row, "loss": -row["loss"]} for row in rows_made(kept + 1, 30)]
    (folder / "metrics.jsonl").write_text(lines(rows))
    assert index.update(folder)
    assert_has(index, folder, rows)


def test_a_record_whose_beginning_alone_is_new(tmp_path: Path, index: RunIndex) -> None:
    rows = rows_made(1, 50)
    folder = make_record(tmp_path / "a", rows)
    index.update(folder)
    rows[0] = {**rows[0], "loss": 2.0}  # as long as before
    with (folder / "metrics.jsonl").open("r+") as file:
        file.write(lines(rows[:1]))
        file.seek(0, 2)
        file.write(lines(rows_made(51, 51)))
    index.update(folder)
    assert_has(index, folder, rows + rows_made(51, 51))


def test_a_record_that_is_gone_for_a_while(tmp_path: Path, index: RunIndex) -> None:
    folder = make_record(tmp_path / "a", rows_made(1, 5))
    index.update(folder)
    (folder / "metrics.jsonl").rename(tmp_path / "elsewhere")
    assert index.update(folder)
    assert_has(index, folder, [])
    (tmp_path / "elsewhere").rename(folder / "metrics.jsonl")
    assert index.update(folder)
    assert_has(index, folder, rows_made(1, 5))


def test_what_is_damaged_is_named_and_the_rest_is_there(tmp_path: Path, index: RunIndex) -> None:
    rows = rows_made(1, 6)
    folder = make_record(tmp_path / "a")
    (folder / "run.json").write_text(json.dumps({"version": 2}))
    parts = [
        lines(rows[:2]),
        "hello <b>\n",
        lines(rows[1:2]),
        lines(rows[2:4]),
        "x" * (3 << 20) + "\n",
        lines(rows[4:]),
    ]
    (folder / "metrics.jsonl").write_text("".join(parts))
    index.update(folder)
    assert_has(index, folder, rows)
    run = index.run(run_id(folder))
    assert run is not None and run.document is None
    assert [problem[:40] for problem in run.problems] == [
        "metrics.jsonl: line 3 is not a row of a ",
        "metrics.jsonl: line 4 is not a row of a ",
        "metrics.jsonl: line 7 has more than 1 Mi",
        f"{folder}/run.json is of version 2; this mpitrain"[:40],
    ]
    assert "step 2 is not after that of the line before" in run.problems[1]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[]\n" + lines(rows_made(7, 8)))
    index.update(folder)
    assert_has(index, folder, rows + rows_made(7, 8))
    run = index.run(run_id(folder))
    assert run is not None and len(run.problems) == 5 and "line 10 is not a row" in " ".join(run.problems)


def test_a_record_with_too_many_metrics(tmp_path: Path, index: RunIndex) -> None:
    folder = make_record(tmp_path / "a", [{"step": 1, **{f"m{number}": 0.5 for number in range(1500)}}])
    index.update(folder)
    run = index.run(run_id(folder))
    assert run is not None and len(run.names) == 1000
    assert "more than 1000 metrics" in run.problems[0]


def test_numbers_that_are_not_finite(tmp_path: Path, index: RunIndex) -> None:
    folder = make_record(tmp_path / "a", [{"step": 1, "a": "NaN", "b": "-Infinity"}, {"step": 2, "a": 1e308}])
    index.update(folder)
    steps, values = points(index, run_id(folder), "a")
    assert steps.tolist() == [1.0, 2.0] and math.isnan(values[0]) and values[1] == 1e308
    assert points(index, run_id(folder), "b")[1].tolist() == [-math.inf]


def test_events_and_resumes_are_in_order(tmp_path: Path, index: RunIndex) -> None:
    event = {
        "after_step": 3,
        "text": "rank 1 was lost",
        "source": "ranks",
        "lost_ranks": [1],
        "num_ranks": 2,
        "seconds": 0.5,
    }
    rows = [
        {"step": 2, "loss": 1.0},
        {"step": 4, "loss": 1.0, "events": [event]},
        {"step": 9, "loss": 1.0, "resumed_after": 8},
    ]
    folder = make_record(tmp_path / "a", rows)
    index.update(folder)
    run = index.run(run_id(folder))
    assert run is not None and run.names == ["loss"]
    assert run.events == [
        {**event, "repeated_steps": 0},
        {"after_step": 8.0, "text": "resumed after step 8", "source": "disk"},
    ]


def damaged_by(path: Path, damage: str) -> None:
    if damage == "text":
        path.write_bytes(b"this is no database, but it is long enough to be read as one" * 100)
    elif damage == "middle":
        content = bytearray(path.read_bytes())
        content[4096:12288] = os.urandom(8192)
        path.write_bytes(content)
    elif damage == "version":
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 77")
    elif damage == "table":
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TABLE pieces")
    else:
        with sqlite3.connect(path) as connection:
            connection.execute(f"UPDATE runs SET {damage} = ?", ("[" * 100_000,))


@pytest.mark.parametrize("damage", ["text", "middle", "version", "table", "names", "place", "last"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_record(tmp_path / "a", rows_made(1, 9000))
    path = tmp_path / "index.sqlite"
    index = RunIndex(path)
    index.update(folder)
    index.close()
    damaged_by(path, damage)
    index = RunIndex(path)
    index.runs()
    points(index, run_id(folder), "loss")  # finds the damage, if nothing has found it before
    index.update(folder)
    assert_has(index, folder, rows_made(1, 9000))
    index.close()
    assert f"the index {path} is made anew" in capsys.readouterr().err


def test_an_index_can_be_asked_to_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    index = RunIndex(path)
    index.update(make_record(tmp_path / "a", rows_made(1, 3)))
    index.close()
    again = RunIndex(path)
    assert len(again.runs()) == 1
    again.close()
    anew = RunIndex(path, anew=True)
    assert anew.runs() == []
    anew.close()


def test_two_dashboards_on_one_index(tmp_path: Path) -> None:
    """Both take in the same growing record at once: each row is there once."""
    folder = make_record(tmp_path / "a")
    indexes = [RunIndex(tmp_path / "index.sqlite") for _ in range(2)]
    is_over = threading.Event()

    def follow(index: RunIndex) -> None:
        while not is_over.is_set():
            index.update(folder)

    threads = [threading.Thread(target=follow, args=(index,)) for index in indexes]
    for thread in threads:
        thread.start()
    with (folder / "metrics.jsonl").open("a") as file:
        for begin in range(1, 2001, 50):
            file.write(lines(rows_made(begin, begin + 49)))
            file.flush()
    is_over.set()
    for thread in threads:
        thread.join()
    for index in indexes:
        index.update(folder)
        assert_has(index, folder, rows_made(1, 2000))
        index.close()


def test_a_record_that_is_gone_is_forgotten(tmp_path: Path, index: RunIndex) -> None:
    folders = [make_record(tmp_path / name, rows_made(1, 2)) for name in "ab"]
    for folder in folders:
        index.update(folder)
    shutil.rmtree(folders[0])
    index.forget_missing([tmp_path])
    assert [run.folder for run in index.runs()] == [str(folders[1])]
    assert len(points(index, run_id(folders[0]), "loss")[0]) == 0


def test_where_records_are_found(tmp_path: Path) -> None:
    make_record(tmp_path / "runs/a")
    make_record(tmp_path / "runs/b/c")
    make_record(tmp_path / "runs/b/c/checkpoints/inner")  # below a record
    make_record(tmp_path / "runs/.hidden/d")
    (tmp_path / "runs/e").mkdir()
    (tmp_path / "runs/e/metrics.jsonl").write_text("")
    (tmp_path / "runs/f/metrics.jsonl").mkdir(parents=True)
    (tmp_path / "runs/link").symlink_to(tmp_path / "runs")
    found = [str(path.relative_to(tmp_path)) for path in find_records([tmp_path / "runs", tmp_path / "missing"])]
    assert found == ["runs/a", "runs/b/c", "runs/e"]


def test_the_document_comes_back(tmp_path: Path, index: RunIndex) -> None:
    folder = make_record(tmp_path / "a")
    index.update(folder)
    run = index.run(run_id(folder))
    assert run is not None and run.document == DOCUMENT and run.problems == []
    assert index.run("0" * 16) is None


@pytest.mark.parametrize("most_bytes", [1, 1000, 1 << 20])
def test_a_record_read_in_pieces(tmp_path: Path, most_bytes: int) -> None:
    """Blocks of a MiB end within lines."""
    rows = [{"step": step, "loss": float(step), "x" * 3000: 0.5} for step in range(1, 1001)]
    path = make_record(tmp_path / "a", rows) / "metrics.jsonl"
    mark, steps = ReadMark(), []
    while mark.offset < path.stat().st_size:
        before = mark.offset
        mark, new = read_on(path, mark, most_bytes)
        assert mark.offset > before
        steps += new.columns["loss"][0]
    numpy.testing.assert_array_equal(steps, numpy.arange(1.0, 1001.0))
    assert mark.num_lines == 1000
