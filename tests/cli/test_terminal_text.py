"""Text for terminals of any width, and for pipes."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from mpitrain.cli.terminal_text import columns_of, cut, wrapped

TEXT = "job 1a2b3c4d, step 412, paused by ada on lab1, after step 412\n  resume\n  set a-b=c\n\nthe end"


@contextmanager
def terminal(columns: int) -> Iterator[TextIO]:
    master, slave = os.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(slave, "w") as stream:
        yield stream
    os.close(master)


def test_a_pipe_gets_the_text_as_it_is() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as stream:
        for one in (stream, io.StringIO()):
            assert columns_of(one) is None
            assert wrapped(TEXT, one) == TEXT
            assert cut(["x" * 500], one) == "x" * 500


def test_a_terminal_that_does_not_say() -> None:
    with terminal(0) as stream:
        assert wrapped(TEXT, stream) == TEXT


def test_lines_are_broken_between_words() -> None:
    with terminal(30) as stream:
        assert wrapped(TEXT, stream).split("\n") == [
            "job 1a2b3c4d, step 412, paused",
            "  by ada on lab1, after step",
            "  412",
            "  resume",
            "  set a-b=c",
            "",
            "the end",
        ]
    with terminal(200) as stream:
        assert wrapped(TEXT, stream) == TEXT


def test_a_path_stays_in_one_piece() -> None:
    path = "/home/ada/" + "a-long-name/" * 9
    with terminal(40) as stream:
        assert wrapped(f"  1a2b3c4d  {path} --epochs 5", stream).split("\n") == [
            "  1a2b3c4d",
            f"    {path}",
            "    --epochs 5",
        ]


@pytest.mark.parametrize("columns", [5, 6, 7])
def test_a_table_is_cut(columns: int) -> None:
    with terminal(columns) as stream:
        assert cut(["JOB", "123456"], stream) == ("JOB\n1234…" if columns == 5 else "JOB\n123456")
