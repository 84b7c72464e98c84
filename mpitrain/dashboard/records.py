"""Where records of runs are: folders with a `metrics.jsonl` or a `run.json`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mpitrain.training.run_document import FILE as DOCUMENT
from mpitrain.training.writers.json_lines import FILE as ROWS

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
    for name in (ROWS, DOCUMENT):
        try:
            status = (folder / name).stat()
        except OSError:
            stamps.append("-")
            continue
        stamps.append(f"{status.st_ino} {status.st_size} {status.st_mtime_ns}")
        changed = max(changed, status.st_mtime)
    return ", ".join(stamps), changed
