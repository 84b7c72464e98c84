"""Texts for Hypothesis, of the characters that code may get wrong.

Its own strategy first makes a table of all of Unicode, which takes 10 s of processor time on a fresh clone.
"""

from __future__ import annotations

from hypothesis import strategies as st

# Quotes, what paths and JSON escape, ends of lines of all kinds, what is not ASCII, combines, or takes four bytes.
CHARACTERS = "aZ_0 .,:/\\'\"`[]{}%$\0\t\n\r\x1b\x7f\x85\xa0éß\u0301\u0661\u200f\u2028\ufeff\uffff漢\U0001f600\U0010ffff"


def texts(max_size: int | None = None) -> st.SearchStrategy[str]:
    """Any of them, in any order."""
    return st.text(CHARACTERS, max_size=max_size)
