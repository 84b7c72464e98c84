"""Rows as JSON, one row per line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.errors import DataError
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.writer import LineFile, Row

FILE = "metrics.jsonl"
# In the first row of a run that resumes without an event: the step after which it resumes.
RESUMED_AFTER = "resumed_after"
# In the first row after events: a list of them.
_EVENTS = "events"


class JsonLines:
    """A Writer of `metrics.jsonl`, which `mpitrain plot` reads: a JSON object for each row, without missing numbers.

    JSON has no NaN and no infinity. The file has the strings "NaN", "Infinity" and "-Infinity" instead, as the JSON of
    Protocol Buffers does. float() accepts these strings.
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

    def write(self, row: Row, events: Sequence[RunEvent] = ()) -> None:
        """See Writer."""
        plain: dict[str, Any] = {name: _plain(value) for name, value in row.items()}
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
            values = json.loads(line)
            events += map(RunEvent.from_plain, values.pop(_EVENTS, ()))
            row = {name: float(value) for name, value in values.items()}
            if not row["step"] > (rows[-1]["step"] if rows else 0):
                raise ValueError(f"step {row['step']:g} is not after that of the line before")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{path}, line {number} is not a row of a record ({type(error).__name__}: {error}); move the file "
                "away, or delete that line and what follows"
            ) from None
        rows.append(row)
    return rows, events


def _plain(value: float) -> float | str:
    if math.isfinite(value):
        return value if isinstance(value, int) else float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
