"""Sizes and times as tables and messages show them."""

from __future__ import annotations

import pytest

from mpitrain.shown import shown_bytes, shown_name, shown_report, shown_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (0.6, "0:00:01"),
        (300, "0:05:00"),
        (3 * 3600 + 61, "3:01:01"),
        (86_399.4, "23:59:59"),
        (86_399.6, "1 d 0 h"),
        (2 * 86_400 + 8 * 3600 - 1, "2 d 7 h"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert shown_seconds(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (5 * 10**15, "5,000.0 TB")],
)
def test_bytes(size: int, text: str) -> None:
    assert shown_bytes(size) == text


def test_a_name_that_is_long_or_has_control_characters() -> None:
    assert shown_name("a\x1b[31mb\n") == "a?[31mb?"
    assert shown_name("x" * 40) == "x" * 40
    assert shown_name("x" * 41) == "x" * 37 + "..."


def test_a_report_that_does_not_fit_into_a_pipe() -> None:
    assert shown_report("x" * 48_000) == "x" * 48_000
    text = shown_report("a" * 30_000 + "b" * 30_000)
    assert text == "a" * 24_000 + "\n... (12,000 characters are left out here) ...\n" + "b" * 24_000
