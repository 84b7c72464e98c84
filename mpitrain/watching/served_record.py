"""What a server publishes about its workers: a JSON text in memory, which has its only name below the server's process.

It is the second part of the record of such a rank (rank_record.py), whose single page has no room for workers. A reader
may come in the middle of a write. The checksum then shows that the text is incomplete, and it reads again.

The text of this module is sent to other hosts. It imports no other module of mpitrain, and runs with an old Python.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.reading import message_of

NAME = "mpitrain-served-workers"
_HEAD = struct.Struct("<QQ")  # the length of the text, and its checksum
_TRIES, _PAUSE_SECONDS = 10, 0.005


class ServedPage:
    """The text of this process."""

    def __init__(self) -> None:
        self._file = os.memfd_create(NAME)

    def write(self, facts: Mapping[str, Any]) -> None:
        """Replace the text. `facts` are those of server.status."""
        text = json.dumps(facts).encode()
        os.pwrite(self._file, _HEAD.pack(len(text), zlib.crc32(text)) + text, 0)


def read_served(path: str) -> dict[str, Any] | None:
    """Return what was last written at `path`, /proc/PID/fd/N; None: there is no such text, or nothing was written yet.

    Raises:
        ValueError: the text is damaged.
    """
    for _ in range(_TRIES):
        try:
            if not os.readlink(path).startswith(f"/memfd:{NAME} "):  # noqa: PTH115 (Path.readlink is of Python 3.9)
                return None
            data = Path(path).read_bytes()
        except OSError:  # the process has ended
            return None
        if not data:
            return None
        if len(data) >= _HEAD.size:
            length, checksum = _HEAD.unpack_from(data)
            text = data[_HEAD.size :][:length]
            if len(text) == length and zlib.crc32(text) == checksum:
                return message_of(text)
        time.sleep(_PAUSE_SECONDS)
    raise ValueError(f"its text does not match its checksum, {_TRIES} times in a row")
