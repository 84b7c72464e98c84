"""Reads what is new in a `metrics.jsonl`, also while a run writes the file. Damage is named, and the rest is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.dashboard.run_notes import FILE as NOTES
from mpitrain.errors import DataError
from mpitrain.training.run_document import FILE as DOCUMENT
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.json_lines import FILE as ROWS
from mpitrain.training.writers.json_lines import RESUMED_AFTER, parse_row

_MOST_DEPTH = 12  # of folders below a given one


def run_id(folder: Path) -> str:
    """Return the id of the run whose record is in this folder."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]


def is_record(folder: Path) -> bool:
    """Return whether this folder has a record."""
    with suppress(OSError):  # another user's
        return any((folder / name).is_file() for name in (ROWS, DOCUMENT))
    return False


def find_records(roots: Sequence[Path], on_folder: Callable[[Path], None] = lambda _: None) -> Iterator[Path]:
    """Iterate over the folders with a record, in the given folders and below. Links to folders are not followed.

    What is below a record, such as its checkpoints, is not searched. `on_folder` is called before a folder is read.
    """
    waiting = [(root, 0) for root in reversed(roots)]
    while waiting:
        folder, depth = waiting.pop()
        on_folder(folder)
        try:
            with os.scandir(folder) as scanned:
                entries = list(scanned)
        except OSError:  # another user's, or it has just gone
            continue
        if any(entry.name in (ROWS, DOCUMENT) and entry.is_file() for entry in entries):
            yield folder
        elif depth < _MOST_DEPTH:
            inner = [entry for entry in entries if not entry.name.startswith(".") and _is_folder(entry)]
            waiting += [
                (Path(entry.path), depth + 1) for entry in sorted(inner, key=lambda one: one.name, reverse=True)
            ]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def stamp_of(folder: Path) -> tuple[str, float]:
    """Return a text that changes with the record's files, and when they were last written."""
    stamps, changed = [], 0.0
    for name in (ROWS, DOCUMENT, NOTES):
        try:
            status = (folder / name).stat()
        except OSError:
            stamps.append("-")
            continue
        stamps.append(f"{status.st_ino} {status.st_size} {status.st_mtime_ns}")
        if name != NOTES:
            changed = max(changed, status.st_mtime)
    return ", ".join(stamps), changed


_BLOCK_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 20
_MOST_NAMES = 1000  # of metrics in a record
_MARK_BYTES = 200


@dataclass
class ReadMark:
    """How far a record was read.

    Attributes:
        offset: the number of bytes that were read: whole lines.
        step: of the last row.
        num_lines: lines that were read.
        head, tail: some of the first bytes of the file, and some before `offset`. If these bytes differ, the file was
            written anew.
    """

    offset: int = 0
    step: float = 0.0
    num_lines: int = 0
    head: bytes = b""
    tail: bytes = b""


@dataclass
class NewRows:
    """Rows that were not read before.

    Attributes:
        columns: for each metric its steps and values, two lists of one length. A row need not have every metric.
        events: what happened in the run, in order: RunEvent.plain, or {"after_step", "text"} where the run resumed.
        last: the last row; {}: there is none.
        num_rows: the number of rows.
        problems: what could not be read, each in a sentence.
    """

    columns: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    num_rows: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, row: dict[str, float], events: list[RunEvent]) -> None:
        """Add a row and the events before it."""
        self.num_rows += 1
        resumed_after = row.pop(RESUMED_AFTER, None)
        if resumed_after is not None:
            text = f"resumed after step {resumed_after:.0f}"
            self.events.append({"after_step": resumed_after, "text": text, "source": "disk"})
        self.events += [event.plain() for event in events]
        self.last = row
        step = row["step"]
        for name, value in row.items():
            name = name.encode(errors="replace").decode()  # noqa: PLW2901 (half of a character has no UTF-8)
            if name == "step":
                continue
            if name not in self.columns:
                if len(self.columns) >= _MOST_NAMES:
                    self._name(f"it has more than {_MOST_NAMES} metrics; {name[:80]!r} and others are left out")
                    continue
                self.columns[name] = ([], [])
            steps, values = self.columns[name]
            steps.append(step)
            values.append(value)

    def _name(self, problem: str) -> None:
        if len(self.problems) < 10:
            self.problems.append(problem)

    def damaged(self, number: int, problem: str) -> None:
        """Note that a line was skipped."""
        self._name(f"line {number} {problem[:300]}; it is left out")


def is_same_file(path: Path, place: ReadMark) -> bool:
    """Return whether the file still begins with what was read.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < place.offset or file.read(len(place.head)) != place.head:
            return False
        file.seek(place.offset - len(place.tail))
        return file.read(len(place.tail)) == place.tail


def read_on(path: Path, place: ReadMark, most_bytes: int) -> tuple[ReadMark, NewRows]:
    """Read about `most_bytes` from `place` on. Return the new place, and the rows. A line without an end is not read.

    Raises:
        OSError: the file cannot be read.
    """
    new = NewRows()
    offset, step, number = place.offset, place.step, place.num_lines
    head, tail = place.head, place.tail
    for line, num_bytes in _lines(path, place.offset, most_bytes):
        number += 1
        before, offset = offset, offset + num_bytes
        if line is None:
            tail = b""
            new.damaged(number, f"has more than {_MOST_LINE_BYTES >> 20} MiB")
            continue
        if len(head) == before:
            head = (head + line + b"\n")[:_MARK_BYTES]
        tail = (line + b"\n")[-_MARK_BYTES:]
        try:
            row, events = parse_row(line, step)
        except DataError as error:
            new.damaged(number, str(error))
            continue
        step = row["step"]
        new.add(row, events)
    return ReadMark(offset, step, number, head, tail), new


def _lines(path: Path, offset: int, most_bytes: int) -> Iterator[tuple[bytes | None, int]]:
    """Iterate over the whole lines, each with its number of bytes. None: a line that is too long."""
    rest = b""
    too_long = 0  # bytes of such a line so far
    with path.open("rb") as file:
        file.seek(offset)
        end = offset + most_bytes
        while block := file.read(_BLOCK_BYTES):
            *lines, rest_of_block = block.split(b"\n")
            for line in lines:
                whole = rest + line
                rest = b""
                if too_long or len(whole) > _MOST_LINE_BYTES:
                    yield None, too_long + len(whole) + 1
                    too_long = 0
                else:
                    yield whole, len(whole) + 1
            rest += rest_of_block
            if too_long or len(rest) > _MOST_LINE_BYTES:
                too_long += len(rest)
                rest = b""
            if file.tell() >= end and lines:
                return
