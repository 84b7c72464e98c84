"""What the launcher says of its job: on stderr, and for those who watch the job (live.py)."""

from __future__ import annotations

import sys
import time
from collections import deque

_MOST = 100

_events: deque[tuple[float, str]] = deque(maxlen=_MOST)


def say(text: str) -> None:
    """Print a line to stderr, and note it."""
    note(text)
    print(f"mpitrain: {text}", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Note an event that is printed elsewhere."""
    _events.append((time.time(), text))


def noted() -> list[dict[str, float | str]]:
    """Return the last events, oldest first: `at`, in seconds since the epoch, and `text`."""
    return [{"at": at, "text": text} for at, text in tuple(_events)]
