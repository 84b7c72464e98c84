"""What the launcher writes into the record of a run whose job has failed: why, and what the ranks printed last.

A rank that is killed can write nothing. If the record is on another host, and not to be seen here, it stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpitrain.launch.log import KEPT, Wanted
from mpitrain.reading import json_of, read_file
from mpitrain.state_files import replace_json

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
            replace_json(document, {**content, "end": text, "ended": time.time()})
        found = KEPT.find(Wanted())
        lines = found["lines"]
        more = bool(found["more"] or len(lines) > _LINES)
        replace_json(Path(folder) / OUTPUT, {**found, "lines": lines[-_LINES:], "more": more, "job": content["job"]})
