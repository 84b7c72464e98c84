"""Tracebacks of Ctrl-C during imports, each in a line."""

from __future__ import annotations

import pytest

from mpitrain.launch.output import OutputPiece
from mpitrain.launch.printer import Interrupts

FRAMES = """Traceback (most recent call last):
  File "/home/me/train.py", line 1, in <module>
    import torch
  File "<frozen importlib._bootstrap>", line 1176, in _find_and_load
  File "/venv/torch/__init__.py", line 445, in <module>
  File "<frozen importlib._bootstrap>", line 241, in _call
"""
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
SHORT = ["interrupted before init(), in __init__.py, line 445"]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (FRAMES + "KeyboardInterrupt\n", SHORT),
        (FRAMES + "KeyboardInterrupt\n" + CHAIN + FRAMES + "ImportError: no core\n", SHORT),
        ("before\n" + FRAMES + "KeyboardInterrupt: \nafter\n", ["before", *SHORT, "after"]),
        (FRAMES + "ValueError: bang\n", [*FRAMES.splitlines(), "ValueError: bang"]),
        (FRAMES, FRAMES.splitlines()),
    ],
)
def test_what_is_printed(text: str, printed: list[str]) -> None:
    interrupts = Interrupts()
    pieces = [piece for line in text.splitlines() for piece in interrupts.shorten(OutputPiece(line.encode(), b"\n"))]
    assert [piece.text.decode() for piece in [*pieces, *interrupts.rest()]] == printed
