"""What the launcher writes into the record of a run whose job has failed: why, and what the ranks printed last.

A rank that is killed can write nothing. If the record is on another host, and not to be seen here, it stays as it is.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.launch.log import KEPT, Wanted
from mpitrain.reading import json_of, read_file

DOCUMENT, OUTPUT = "run.json", "output.json"
_LINES = 200
_MOST_BYTES = 1 << 20
_ENDS = ("", "left")  # of a run.json whose run has not said how it ended, or was to continue in another attempt


def note_failure(folder: str | None, ids: Sequence[str], text: str) -> None:
    """Write into the record in `folder` that the job with these ids has failed, and the last lines of its ranks."""
    if not folder:
        return
    document = Path(folder) / DOCUMENT
    with suppress(OSError, ValueError):
        content = json_of(read_file(document, ValueError, most_bytes=_MOST_BYTES), ValueError, str(document))
        if content.get("job") not in ids:  # another job has taken the folder
            return
        if content.get("end") in _ENDS:  # first, because it is small: the disk may be full
            _replace(document, {**content, "end": text, "ended": time.time()})
        found = KEPT.find(Wanted())
        lines = found["lines"]
        more = bool(found["more"] or len(lines) > _LINES)
        _replace(Path(folder) / OUTPUT, {**found, "lines": lines[-_LINES:], "more": more, "job": content["job"]})


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file, for this user alone if it is new. Whatever happens, it has the old content or the new one."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
