"""Files in which commands keep what they have found: whole or not at all, and refused with the reason."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from mpitrain.errors import DataError, MpitrainError
from mpitrain.state_files import cache_folder, keep_state, read_state, state_folder


def test_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "mpitrain"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", "/home/ada")
    assert state_folder() == Path("/home/ada/.local/state/mpitrain")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/ada/.cache/mpitrain")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "mpitrain"


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as in a container: there is no HOME, and the user has no entry."""

    def no_entry(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    with pytest.raises(DataError, match=rf"the user {os.getuid()} has no entry .* Set XDG_STATE_HOME"):
        state_folder()
    with pytest.raises(DataError, match=r"in ~/\.cache/mpitrain, but HOME is not set, .* Set XDG_CACHE_HOME"):
        cache_folder()


def test_a_file_comes_back_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a/b/x.json"
    assert read_state(path, 1, 1000) is None
    for content in ({"a": [1, 2.5, None, "\u00e9\ud800"]}, {"b": 7}):
        keep_state(path, 1, content)
        assert read_state(path, 1, 1000) == {"version": 1, **content}
    assert [one.name for one in path.parent.iterdir()] == ["x.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The earlier one stays, and nothing half written."""
    path = tmp_path / "x.json"
    keep_state(path, 1, {"a": 1})
    with pytest.raises(TypeError):
        keep_state(path, 1, {"a": object()})
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]
    assert read_state(path, 1, 1000) == {"version": 1, "a": 1}
    with pytest.raises(MpitrainError, match=r"x\.json/y cannot be written, .* Set XDG_STATE_HOME"):
        keep_state(path / "y", 1, {})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((content, "is damaged") for content in (b"", b'{"version": 1', b"[1]", b"{}", b"\xff\xfe", b"[" * 900)),
        *((content, "is damaged") for content in (b'{"version": true}', b'{"version": 0}')),
        (b'{"version": 3}', "is of version 3; this mpitrain reads up to 2. Update mpitrain"),
        (b" " * 1001, "is too large: at most 1000 bytes are read"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_state(path, 2, 1000)
    assert str(path) in str(caught.value) and says in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    """A pipe would hold up whoever opens it to read."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is not a file"):
        read_state(tmp_path / "pipe", 1, 1000)
    with pytest.raises(DataError, match=r"cannot be read|is not a file"):
        read_state(tmp_path, 1, 1000)


def test_an_older_form_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(json.dumps({"version": 1, "a": 2}))
    assert read_state(tmp_path / "x", 2, 1000) == {"version": 1, "a": 2}
