"""The users' notes on a run, in `notes.json` beside its record: a name, a note, tags, and whether lists hide it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mpitrain.errors import DataError
from mpitrain.reading import find_file, json_of, parsed
from mpitrain.training.writers.writer import replace_file
from mpitrain.typed import made

FILE = "notes.json"
_MOST_BYTES = 64 << 10
_MOST_NAME, _MOST_NOTE, _MOST_TAGS = 200, 10_000, 20


@dataclass(frozen=True)
class RunNotes:
    """The content of the file.

    Attributes:
        name: is shown in place of the folder's; "": the folder's name is.
        note: a text.
        tags: words by which runs are found.
        is_hidden: lists omit the run, unless hidden ones are requested too.
    """

    name: str = ""
    note: str = ""
    tags: list[str] = field(default_factory=list)
    is_hidden: bool = False


def read_notes(folder: Path) -> RunNotes:
    """Return the notes beside a record; empty ones if there are none.

    Raises:
        DataError: the file cannot be read or is not such a file.
    """
    text = find_file(folder / FILE, DataError, most_bytes=_MOST_BYTES)
    return RunNotes() if text is None else notes_of(text, str(folder / FILE))


def notes_of(text: bytes, called: str) -> RunNotes:
    """Return the notes in a JSON object; what it lacks is empty.

    Raises:
        DataError: it is something else, or too long.
    """
    content = json_of(text, DataError, called, any_text=True)
    notes: RunNotes = parsed(lambda: made(RunNotes, content), DataError, called, "has no notes of a run")
    if len(notes.name) > _MOST_NAME or len(notes.note) > _MOST_NOTE or len(notes.tags) > _MOST_TAGS:
        raise DataError(
            f"{called}: a name has at most {_MOST_NAME} letters, a note {_MOST_NOTE:,}, and a run {_MOST_TAGS} tags"
        )
    return notes


def write_notes(folder: Path, notes: RunNotes) -> None:
    """Replace the notes beside a record.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(folder / FILE, json.dumps(asdict(notes), indent=1).encode() + b"\n")
