"""The interface of writers, and a file of lines in which no crash leaves a broken line."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from mpitrain.errors import DataError
from mpitrain.training.run_document import RunDocument
from mpitrain.training.run_event import RunEvent

# Numbers by name; "step" is one of them. Rows come in the order of their steps.
Row: TypeAlias = Mapping[str, float]
OUTER_STEPS = "outer_steps"  # in a row: the number of outer steps so far in this run


class Writer(Protocol):
    """Stores rows. Only rank 0 calls it. Its str() is the file's name, for messages."""

    def open(self, after_step: int) -> None:
        """Begin, or continue: remove rows of steps after `after_step`.

        Raises OSError if the file cannot be made or read, and DataError if it is not a file of this writer.
        """

    def write(self, row: Row, events: Sequence[RunEvent] = ()) -> None:
        """Write a row and hand it to the operating system. After an OSError the same row may come again.

        `events` are those since the previous row. A writer of numbers alone may ignore them.
        """

    def close(self) -> None:
        """Close the file. Does nothing if `open` was not called."""


@runtime_checkable
class DescribingWriter(Writer, Protocol):
    """A writer that also stores the description of the run."""

    def describe(self, document: RunDocument) -> None:
        """Store the document, in place of an earlier one. Called after `open`, and again at the end.

        Raises OSError if the file cannot be written.
        """


@runtime_checkable
class BatchingWriter(Writer, Protocol):
    """A writer that is faster if it gets all missing rows at once."""

    def write_all(self, rows: Sequence[tuple[Row, Sequence[RunEvent]]]) -> None:
        """Write rows, each with its events, as `write` does. After an OSError the same rows may come again."""


def replace_file(path: Path, content: bytes) -> None:
    """Write a file. Whatever happens, it has the old content or the new one."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class LineFile:
    """A file to which lines are added, each completely or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None
        self._end = 0

    def open(self) -> list[bytes]:
        """Open or make the file and return its lines. Remove an incomplete last line, as kill -9 leaves it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Do not use "a+": with O_APPEND a part of a line could not be overwritten.
        self._file = io.FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # a pipe must not be written to
            raise DataError(f"{self.path} is not a file; move it away")
        *lines, _ = self._file.readall().split(b"\n")
        self._cut(sum(len(line) + 1 for line in lines))
        return lines

    def lines(self) -> list[bytes]:
        """Return the lines that were kept and added."""
        return self.path.read_bytes()[: self._end].split(b"\n")[:-1]

    def keep(self, lines: list[bytes]) -> None:
        """Remove everything after these lines, which are the first lines of the file."""
        self._cut(sum(len(line) + 1 for line in lines))

    def _cut(self, end: int) -> None:
        assert self._file is not None
        self._end = end
        self._file.truncate(end)

    def add(self, line: bytes) -> None:
        """Add a line. After an OSError, such as on a full disk, the next line takes its place."""
        assert self._file is not None
        rest = memoryview(line + b"\n")
        self._file.seek(self._end)
        while rest:  # a disk that becomes full writes only a part
            rest = rest[self._file.write(rest) :]
        self._end += len(line) + 1
        self._file.truncate(self._end)  # a part of a longer line may remain here

    def replace(self, lines: list[bytes]) -> None:
        """Replace all lines. Whatever happens, the file has the old lines or the new ones."""
        replace_file(self.path, b"".join(line + b"\n" for line in lines))
        self.close()
        self.open()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
