"""Rows as comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from mpitrain.errors import DataError
from mpitrain.reading import parsed, whole
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.writer import LineFile, Row

FILE = "metrics.csv"


class Csv:
    """A Writer of `metrics.csv`: a line of names, then a line for each row. A missing number is an empty field.

    If a row has a new name, as after the first evaluation, the file is replaced by one with a column for this name.
    """

    def __init__(self, directory: Path | str) -> None:
        """`directory` is created if it is missing. Rank 0 writes there.

        A run that begins at step 0 overwrites the file. A run that resumes removes its rows of later steps.
        """
        self._file = LineFile(Path(directory) / FILE)
        self._names: list[str] = []

    def __str__(self) -> str:
        return str(self._file.path)

    def open(self, after_step: int) -> None:
        """See Writer."""
        header, *lines = self._file.open() or [b""]
        self._names = self._cells(header, 1)
        kept = []
        for number, line in enumerate(lines, 2):
            cells = self._cells(line, number)
            step = whole(cells[0], 0, 2**53) if cells else None
            if self._names[:1] != ["step"] or len(cells) != len(self._names) or step is None:
                raise DataError(f"{self}, line {number} is not a row of a record; move the file away")
            if step <= after_step:
                kept.append(line)
        self._file.keep([header, *kept] if header else [])

    def write(self, row: Row, events: Sequence[RunEvent] = ()) -> None:
        """See Writer. Events are left out."""
        new = [name for name in row if name not in self._names]
        if new:
            names = [*self._names, *new]
            # From the file: a long run has many rows, and new names are rare.
            lines = [line + b"," * len(new) for line in self._file.lines()[1:]]
            self._file.replace([_line(names), *lines])
            self._names = names
        line = _line([repr(row[name]) if name in row else "" for name in self._names])
        self._file.add(line)

    def _cells(self, line: bytes, number: int) -> list[str]:
        def parse() -> list[str]:
            return next(csv.reader([line.decode(errors="replace")]), [])

        def refusal(said: str) -> DataError:
            return DataError(f"{said}; move the file away")

        cells: list[str] = parsed(parse, refusal, f"{self}, line {number}", "is not a row of a record")
        return cells

    def close(self) -> None:
        """See Writer."""
        self._file.close()


def _line(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue().encode()
