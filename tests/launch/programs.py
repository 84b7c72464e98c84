"""Shared by the tests of the launcher: a shell script in place of another program."""

from __future__ import annotations

from pathlib import Path


def program(path: Path, text: str) -> Path:
    """Make an executable script, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
