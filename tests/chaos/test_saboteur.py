"""What a saboteur finds of a job that is over."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

import pytest

from mpitrain.chaos import saboteur
from mpitrain.chaos.saboteur import Saboteur
from mpitrain.launch.shared_files import FOLDER, lock, of_ranks


def test_what_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in /tmp, and a folder that a rank has left which was killed while MPI started."""
    monkeypatch.setattr(saboteur, "_LEAVE_SECONDS", 0.0)
    here, token = Saboteur({"launcher": "nowhere 1 2", "folder": ""}), secrets.token_hex(4)
    here._tokens.append(token)
    assert here._left() == []
    with (
        tempfile.NamedTemporaryFile(prefix=f"mpitrain-roll-call-{token}", dir="/tmp") as file,
        tempfile.TemporaryDirectory(prefix=of_ranks(token), dir=FOLDER) as folder,
        tempfile.TemporaryDirectory(prefix=of_ranks(secrets.token_hex(4)), dir=FOLDER),
    ):
        (Path(folder) / "sm_segment.a").touch()
        descriptor = lock(folder)  # else another job on this machine may remove it
        assert here._left() == [folder, file.name]
        os.close(descriptor)
