"""Rows as JSON, one row per line; and beside them what the run is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.errors import DataError
from mpitrain.training.run_document import FILE as DOCUMENT
from mpitrain.training.run_document import RunDocument, read_document
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.writer import LineFile, Row, replace_file

FILE = "metrics.jsonl"
# In the first row of a run that resumes without an event: the step after which it resumes.
RESUMED_AFTER = "resumed_after"
# In the first row after events: a list of them.
_EVENTS = "events"


class JsonLines:
    """A Writer of `metrics.jsonl`, which `mpitrain plot` reads: a JSON object for each row, without missing numbers.

    JSON has no NaN and no infinity. The file has the strings "NaN", "Infinity" and "-Infinity" instead, as the JSON of
    Protocol Buffers does. float() accepts these strings.

    Beside it, `run.json` says what the run is and how it ended (RunDocument). `mpitrain dashboard` reads both.
    """

    def __init__(self, directory: Path | str) -> None:
        """`directory` is made if it is missing. Rank 0 writes there.

        A run that begins at step 0 overwrites the file. A run that resumes removes its rows of later steps.
        """
        self._file = LineFile(Path(directory) / FILE)
        self._resumed: dict[str, float] = {}  # for the next row

    def __str__(self) -> str:
        return str(self._file.path)

    def open(self, after_step: int) -> None:
        """See Writer."""
        lines = self._file.open()
        rows, _ = _parse(lines, self._file.path)
        self._resumed = {RESUMED_AFTER: after_step} if after_step else {}
        self._file.keep([line for line, row in zip(lines, rows, strict=True) if row["step"] <= after_step])

    def describe(self, document: RunDocument) -> None:
        """See DescribingWriter. A run that resumes keeps the time at which the training began."""
        path = self._file.path.with_name(DOCUMENT)
        if document.after_step:
            with suppress(DataError):  # it is missing or damaged: this run's own is written
                document = replace(document, first_started=read_document(path).first_started)
        replace_file(path, document.text().encode())

    def write(self, row: Row, events: Sequence[RunEvent] = ()) -> None:
        """See Writer."""
        plain: dict[str, Any] = {name: plain_number(value) for name, value in row.items()}
        plain |= {_EVENTS: [event.plain() for event in events]} if events else self._resumed
        self._file.add(json.dumps(plain).encode())
        self._resumed = {}

    def close(self) -> None:
        """See Writer."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, float]]:
    """Return the rows of a `metrics.jsonl`, also of a run that is still writing the file.

    Raises:
        DataError: the file cannot be read, or has a line that is not a row.
    """
    return _parse(_lines(path), path)[0]


def read_events(path: Path) -> list[RunEvent]:
    """Return the events of a `metrics.jsonl`. Like `read_rows`."""
    return _parse(_lines(path), path)[1]


def _lines(path: Path) -> list[bytes]:
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from None
    return lines


def _parse(lines: Sequence[bytes], path: Path) -> tuple[list[dict[str, float]], list[RunEvent]]:
    """Return the rows and the events in these lines of `path`. Raise DataError for a line that is not a row."""
    rows: list[dict[str, float]] = []
    events: list[RunEvent] = []
    for number, line in enumerate(lines, 1):
        try:
            row, events_of_row = parse_row(line, rows[-1]["step"] if rows else 0)
        except DataError as error:
            raise DataError(
                f"{path}, line {number} {error}; move the file away, or delete that line and what follows"
            ) from None
        rows.append(row)
        events += events_of_row
    return rows, events


def parse_row(line: bytes, after_step: float) -> tuple[dict[str, float], list[RunEvent]]:
    """Return the row and the events of one line, which follows a row of step `after_step`.

    Raises:
        DataError: it is not a row. The text goes on after the name of the line.
    """
    try:
        values = json.loads(line)
        events = [RunEvent.from_plain(fields) for fields in values.pop(_EVENTS, ())]
        row = {name: float(value) for name, value in values.items()}
        if not row["step"] > after_step:
            raise ValueError(f"step {row['step']:g} is not after that of the line before")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"is not a row of a record ({type(error).__name__}: {error})") from None
    return row, events


def plain_number(value: float) -> float | str:
    """Return a number as the file has it."""
    if math.isfinite(value):
        return value if isinstance(value, int) else float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
