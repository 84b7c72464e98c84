"""Sizes, times and names, formatted for tables and messages."""

from __future__ import annotations

from datetime import timedelta

_MOST_TEXT = 40
_MOST_REPORT = 48_000
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def shown_bytes(num_bytes: int) -> str:
    """Return text such as `12.3 MB`."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes:,} B"


def shown_seconds(seconds: float) -> str:
    """Return a duration as text, such as `0:05:00`; from a day on, such as `2 d 7 h`, rounded down."""
    days, rest = divmod(round(seconds), 86_400)
    return f"{days} d {rest // 3600} h" if days else str(timedelta(seconds=rest))


def shown_name(text: str) -> str:
    """Return a name without unprintable characters; "..." replaces what does not fit into a table."""
    short = text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in short)


def shown_report(text: str) -> str:
    """Return the text of an error, without the middle if it is too long for a pipe (64 KiB), which may have no
    reader."""
    half = _MOST_REPORT // 2
    if len(text) <= _MOST_REPORT:
        return text
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} characters are left out here) ...\n{text[-half:]}"
