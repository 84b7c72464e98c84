"""Sizes and names as tables and lines show them."""

from __future__ import annotations

_MOST_TEXT = 40
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def shown_bytes(num_bytes: int) -> str:
    """Return text such as `12.3 MB`."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes:,} B"


def shown_name(text: str) -> str:
    """Return a name without characters that cannot be printed; "..." stands for what does not fit into a table."""
    short = text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in short)
