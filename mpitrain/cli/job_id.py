"""The id of a job on the command line."""

from __future__ import annotations

import argparse
import re

_ID = re.compile(r"[0-9a-f]{8}")


def job_id(text: str) -> str:
    """Return the id that `text` is; an option's or argument's `type`."""
    if not _ID.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the id of a job; an id has 8 characters, as 1a2b3c4d, and `mpitrain ps` shows it"
        )
    return text
