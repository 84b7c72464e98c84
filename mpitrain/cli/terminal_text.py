"""Output of commands: text that fits the width of a terminal, and, for --json, one JSON object.

In a pipe or a file, text is unchanged.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO


def columns_of(stream: TextIO) -> int | None:
    """Return the width of the terminal; None: the stream is not a terminal, or its width is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def wrapped(text: str, stream: TextIO) -> str:
    """Return lines that are broken between words. What follows of a line is indented by two more."""
    columns = columns_of(stream)
    if columns is None:
        return text
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(
            line,
            columns,
            subsequent_indent=indent,
            break_long_words=False,  # paths, which a user may copy
            break_on_hyphens=False,
            replace_whitespace=False,
        ) or [""]
    return "\n".join(lines)


def cut(lines: list[str], stream: TextIO) -> str:
    """Return the lines of a table, each no longer than the terminal is wide."""
    columns = columns_of(stream)
    return "\n".join(line if columns is None or len(line) <= columns else f"{line[: columns - 1]}…" for line in lines)


def printable(text: str) -> str:
    """Return text without control characters: names and errors come from scripts."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def print_object(content: Mapping[str, Any]) -> None:
    """Print the object on stdout. JSON has no NaN and no infinity: they are strings, as in metrics.jsonl."""
    print(json.dumps(_plain(content), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    from mpitrain.launch.live_picture import plain

    if isinstance(value, float):
        return plain(value)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
