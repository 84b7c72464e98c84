"""Rows as JSON, one per line, with a description of the run in a second file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.errors import DataError
from mpitrain.reading import json_of, parsed, read_file, shown
from mpitrain.training.run_document import FILE as DOCUMENT
from mpitrain.training.run_document import RunDocument, read_document
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.writer import LineFile, Row, replace_file

FILE = "metrics.jsonl"
# In the first row of a run that resumes without an event: the step after which it resumes.
RESUMED_AFTER = "resumed_after"
# In the first row after events: a list of them.
_EVENTS = "events"
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_MOST_STEPS = 2.0**53
_MOST_BYTES = 1 << 32
_NO_NUMBERS = (dict, list, type(None))


class JsonLines:
    """A Writer of `metrics.jsonl`, which `mpitrain plot` reads: a JSON object for each row, without missing numbers.

    JSON has no NaN and no infinity. The file has the strings "NaN", "Infinity" and "-Infinity" instead, as the JSON of
    Protocol Buffers does. float() accepts these strings.

    Beside it, `run.json` describes the run and how it ended (RunDocument). `mpitrain dashboard` reads both.
    """

    def __init__(self, directory: Path | str) -> None:
        """`directory` is created if it is missing. Rank 0 writes there.

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

    def note_end(self, process: str, end: str) -> None:
        """Note why the run of this process of rank 0 has ended. Any rank that can access the folder may call this.

        Raises:
            OSError: the file cannot be written.
        """
        path = self._file.path.with_name(DOCUMENT)
        with suppress(DataError):  # it is missing here
            document = read_document(path)
            if document.process == process and not document.end:
                replace_file(path, document.ended_now(end).text().encode())

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
    """Return the rows of a `metrics.jsonl`, even while a run is still writing the file.

    Raises:
        DataError: the file cannot be read, or has a line that is not a row.
    """
    return _parse(_lines(path), path)[0]


def read_events(path: Path) -> list[RunEvent]:
    """Return the events of a `metrics.jsonl`, and the commands after its last row. Raises as `read_rows`."""
    events = _parse(_lines(path), path)[1]
    with suppress(DataError):  # there is no document, or it cannot be read
        events += read_document(path.with_name(DOCUMENT)).orders_without(events)
    return events


def _lines(path: Path) -> list[bytes]:
    return read_file(path, DataError, most_bytes=_MOST_BYTES).split(b"\n")[:-1]


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
        DataError: it is not a row. The text continues a sentence that begins with the line's name.
    """
    form = "is not a row of a record"
    values = json_of(line, DataError, "", form=form, any_text=True, any_number=True)  # _number is stricter, and faster

    def parse() -> tuple[dict[str, float], list[RunEvent]]:
        events = [RunEvent.from_plain(fields) for fields in values.pop(_EVENTS, ())]
        # A value that is not a number comes from another version of mpitrain.
        row = {name: _number(name, value) for name, value in values.items() if not isinstance(value, _NO_NUMBERS)}
        if not after_step < row["step"] < _MOST_STEPS or not abs(row.get(RESUMED_AFTER, 0)) < _MOST_STEPS:
            raise ValueError(f"step {row['step']:g} is not after that of the line before")
        return row, events

    row, events = parsed(parse, DataError, "", form)
    return row, events


def _number(name: str, value: object) -> float:
    if isinstance(value, (int, float)):
        if -math.inf < value < math.inf:
            return float(value)
    elif value in _NOT_FINITE:
        return float(value)
    raise ValueError(f"{shown(name)} is {shown(value)}; it must be a number")


def plain_number(value: float) -> float | str:
    """Return a number in the form that the file has."""
    if math.isfinite(value):
        return value if isinstance(value, int) else float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
