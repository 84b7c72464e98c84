"""Files of a record: whole lines only, whatever ends the process; the same rows in each form."""

from __future__ import annotations

import csv
import gc
import math
import os
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS, REPOSITORY, clean_environment
from mpitrain import RunEvent
from mpitrain.errors import DataError
from mpitrain.training.writers.json_lines import RESUMED_AFTER, read_events, read_rows
from mpitrain.training.writers.writer import LineFile
from mpitrain.writers import Csv, JsonLines, TensorBoard

ROWS: list[dict[str, float]] = [
    {"step": 2, "loss": 0.1 + 0.2, "big": 1e300},
    {"step": 4, "loss": math.inf, "test, accuracy": 0.5},
    {"step": 6, "loss": 5e-324, 'a "quoted" name': -0.0},
]


def read_csv(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def read_scalars(directory: Path) -> list[dict[str, Any]]:
    """The scalars that TensorBoard shows: those of later steps than a start's are left out in the files before it."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    rows: list[dict[str, Any]] = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])  # then a checksum of that; behind the event one of the event
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.session_log.status == SessionLog.START:
                rows = [row for row in rows if row["step"] < event.step]
            elif event.HasField("summary"):
                rows.append({"step": event.step} | {value.tag: value.simple_value for value in event.summary.value})
    return rows


def unmarked(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without the mark of a run that resumed, which JsonLines alone makes."""
    return [{name: value for name, value in row.items() if name != RESUMED_AFTER} for row in rows]


def written(writer: Any, rows: list[dict[str, float]], after_step: int = 0) -> None:
    try:
        writer.open(after_step)
        for row in rows:
            writer.write(row)
    finally:
        writer.close()


def test_rows_come_back_to_the_last_bit(tmp_path: Path) -> None:
    written(JsonLines(tmp_path / "a/b"), ROWS)
    written(Csv(tmp_path / "a/b"), ROWS)
    assert read_rows(tmp_path / "a/b/metrics.jsonl") == ROWS
    assert read_csv(tmp_path / "a/b/metrics.csv") == ROWS
    assert math.copysign(1, read_rows(tmp_path / "a/b/metrics.jsonl")[2]['a "quoted" name']) == -1
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_json_without_python_words(tmp_path: Path) -> None:
    written(JsonLines(tmp_path), [{"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 3}])
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 3}\n'
    assert math.isnan(read_rows(tmp_path / "metrics.jsonl")[0]["a"])


@pytest.mark.parametrize("after_step", [0, 1, 2, 5, 6, 9])
def test_what_is_cut_away_on_resuming(tmp_path: Path, after_step: int) -> None:
    kept = [row for row in ROWS if row["step"] <= after_step]
    new = [{"step": step, "loss": float(step), "new": 1.0} for step in (10, 12)]
    for writer in (JsonLines(tmp_path), Csv(tmp_path)):
        written(writer, ROWS)
        written(writer, new, after_step)
    mark = {RESUMED_AFTER: after_step} if after_step else {}
    assert read_rows(tmp_path / "metrics.jsonl") == [*kept, {**new[0], **mark}, *new[1:]]
    assert read_csv(tmp_path / "metrics.csv") == kept + new


def test_events_are_in_the_row_behind_them(tmp_path: Path) -> None:
    first = RunEvent(3, "ranks 1 and 2 on a were lost", "ranks", (1, 2), 2, 0.1)
    second = RunEvent(3, "b fell silent", "memory", (), 1, 1.5, repeated_steps=2)
    written(JsonLines(tmp_path), ROWS[:1])
    for writer in (JsonLines(tmp_path), Csv(tmp_path), TensorBoard(tmp_path)):
        writer.open(3)
        writer.write(ROWS[1], [first, second])
        writer.write(ROWS[2])
        writer.close()
    assert read_rows(tmp_path / "metrics.jsonl") == ROWS
    assert read_csv(tmp_path / "metrics.csv") == ROWS[1:]
    assert read_events(tmp_path / "metrics.jsonl") == [first, second]
    assert ["events" in line for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [False, True, False]


@pytest.mark.parametrize("make", [JsonLines, Csv, TensorBoard])
def test_memory_does_not_grow_with_rows(tmp_path: Path, make: Any) -> None:
    writer = make(tmp_path)
    writer.open(0)
    row: dict[str, float] = {f"metric {number}": 0.123456789 for number in range(20)}

    def write(first: int, last: int) -> int:
        for step in range(first, last):
            writer.write({"step": step, **row})
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = write(1, 200)
        assert write(200, 1200) - before < 30_000  # each of the rows has some 300 bytes
    finally:
        tracemalloc.stop()
        writer.close()


@pytest.mark.parametrize("events", ["[1]", '[{"after_step": 3}]', "7", "{}x", '[{"after_step": Infinity, "text": ""}]'])
def test_what_is_no_event(tmp_path: Path, events: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"step": 2, "events": {events}}}\n')
    with pytest.raises(DataError, match="line 2 is not a row of a record"):
        read_rows(tmp_path / "metrics.jsonl")


def test_every_place_where_a_process_may_have_been_killed(tmp_path: Path) -> None:
    """A file that ends anywhere: whole rows are kept, what was begun is written anew."""
    for make, name, read in ((JsonLines, "metrics.jsonl", read_rows), (Csv, "metrics.csv", read_csv)):
        written(make(tmp_path), ROWS)
        content = (tmp_path / name).read_bytes()
        for length in range(len(content) + 1):
            (tmp_path / name).write_bytes(content[:length])
            whole = max(0, content[:length].count(b"\n") - (name == "metrics.csv"))
            written(make(tmp_path), ROWS[whole:], after_step=100)
            assert unmarked(read(tmp_path / name)) == ROWS, length


def test_tensorboard(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": step / 2, "a name": math.inf} for step in (2, 4, 6)]
    written(TensorBoard(tmp_path), rows)
    assert read_scalars(tmp_path) == rows
    again = [{"step": step, "loss": -1.0} for step in (4, 5)]
    written(TensorBoard(tmp_path), again, after_step=3)
    assert read_scalars(tmp_path) == rows[:1] + again
    assert len(list(tmp_path.iterdir())) == 2


def test_flushed_and_killed(tmp_path: Path) -> None:
    """kill -9 right after a row: it is there, in each form."""
    program = (
        "import os, signal, sys, mpitrain as mt\n"
        "from mpitrain.writers import Csv, JsonLines, TensorBoard\n"
        "for writer in (JsonLines(sys.argv[1]), Csv(sys.argv[1]), TensorBoard(sys.argv[1] + '/events')):\n"
        "    writer.open(0)\n"
        "    writer.write({'step': 1, 'loss': 0.5})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = clean_environment() | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == -signal.SIGKILL
    rows = [{"step": 1, "loss": 0.5}]
    assert read_rows(tmp_path / "metrics.jsonl") == read_csv(tmp_path / "metrics.csv") == rows
    assert read_scalars(tmp_path / "events") == rows


FULL = """
import resource, sys
import mpitrain as mt

class Full(mt.Hook):
    def after_step(self, trainer, step):
        if step.number in (5, 9):
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]) if step.number == 5 else -1, -1))
"""


@pytest.mark.parametrize("limit", [700, 801])
def test_a_disk_that_is_full_for_a_while(tmp_path: Path, limit: int) -> None:
    """No file may grow beyond a limit from step 5 to 9: a write takes a part of a line, the next one nothing."""
    program = (REPOSITORY / "tests/training/recorded_training.py").read_text()
    program = FULL + program.replace("[mt.StopAtStep", "[Full(), mt.StopAtStep")
    command = [sys.executable, "-c", program, str(tmp_path), "12", str(limit)]
    done = subprocess.run(
        command, env=clean_environment(), timeout=HANG_SECONDS, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name in ("metrics.jsonl", "metrics.csv"):
        path = tmp_path / name
        if f"{path} cannot be written: [Errno 27] File too large. Training continues" in done.stderr:
            assert f"{path} is written again; no row is lost" in done.stderr
    assert f"{tmp_path / 'metrics.jsonl'} cannot be written" in done.stderr
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert read_csv(tmp_path / "metrics.csv") == rows


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hello\n", 1),
        ('{"step": 1}\n[]\n', 2),
        ('{"step": 1}\n\n', 2),
        ('{"loss": 1}\n', 1),
        ('{"step": 2}\n{"step": 2}\n', 2),
        ('{"step": 1}\n\0\0\0\n{"step": 2}\n', 2),
        ('{"step": "one"}\n', 1),
        ('{"step": NaN}\n', 1),
        ('{"step": Infinity}\n', 1),
        (f'{{"step": 1{"0" * 400}}}\n', 1),
        (f'{{"step": 1{"0" * 5000}}}\n', 1),
    ],
)
def test_json_that_is_no_record(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"line {line} is not a row of a record: .*; move the file away"):
        written(JsonLines(tmp_path), [], 100)
    with pytest.raises(DataError, match=f"line {line} is not a row"):
        read_rows(path)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "step,b\n1\n", "step,b\nx,1\n", "\n\n", "step\n\0\n"])
def test_csv_that_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(DataError, match="line 2 is not a row of a record; move the file away"):
        written(Csv(tmp_path), [], 100)
    assert path.read_text() == text


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for make in (JsonLines, Csv, TensorBoard):
        with pytest.raises(FileExistsError):
            make(tmp_path / "file").open(0)
        make(tmp_path / "file").close()


def test_a_line_file_is_not_inherited(tmp_path: Path) -> None:
    """A process that a user's program starts does not keep it open."""
    file = LineFile(tmp_path / "lines")
    file.open()
    assert not os.get_inheritable(file._file.fileno())
    file.close()
