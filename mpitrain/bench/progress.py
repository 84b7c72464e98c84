"""A line on the terminal that says what is being measured."""

from __future__ import annotations

import sys
import time

_SECONDS = 0.5  # the time between two changes of the line


class Progress:
    """The progress line. It prints nothing unless `is_wanted`, which is on rank 0 on a terminal."""

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._next = 0.0

    def tell(self, text: str) -> None:
        """Replace the line with `text`, but not too often."""
        if self._is_wanted and time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS
            self._write(text)

    def end(self) -> None:
        """Remove the line."""
        if self._is_wanted:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stdout.write(f"\r\x1b[K{text}")
        sys.stdout.flush()
