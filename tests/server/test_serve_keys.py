"""Keys: their text, their file, and who may read it."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.server.security import key_file, keys_of, make_keys, parse_key, read_keys


def test_the_text_of_a_key() -> None:
    keys = make_keys()
    text = keys.worker.text
    assert re.fullmatch(r"[A-Za-z0-9_-]{88}", text)
    assert parse_key(f" {text}\n", "the key") == keys.worker
    assert keys.worker.password.decode() not in text
    for wrong in (
        "",
        text[:-1],
        text[:20] + text[21:],
        text.replace(text[5], "A" if text[5] != "A" else "B"),
        text + "x",
        "é" * 88,
    ):
        with pytest.raises(ConfigError, match="MPITRAIN_KEY is no key: "):
            parse_key(wrong, "MPITRAIN_KEY")


def test_a_server_that_starts_again_has_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "state" / "serve-5000.key"
    keys = keys_of(path)
    assert keys_of(path) == read_keys(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    assert keys_of(tmp_path / "other.key") != keys


def test_keys_that_others_may_read_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "serve.key"
    keys_of(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"mode 640; it must be yours, with mode 600.*rm {path}"):
        keys_of(path)


@pytest.mark.parametrize("text", ["", "one two three", "ab", "zz\n" + "A" * 88, b"\xff\xfe".decode("latin1")])
def test_a_file_without_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.key"
    keys_of(path)
    path.write_text(text, "latin1")
    with pytest.raises(ConfigError, match=r"no file with a server's keys|cannot be read"):
        keys_of(path)


def test_secrets_of_two_servers_do_not_mix(tmp_path: Path) -> None:
    path, other = tmp_path / "serve.key", make_keys()
    keys = keys_of(path)
    path.write_text(f"{other.server_secret.hex()}\n{keys.worker.text}\n")
    with pytest.raises(ConfigError, match="no file with a server's keys"):
        keys_of(path)


def test_where_keys_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert key_file(5000) == tmp_path / "mpitrain" / "serve-5000.key"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert key_file(80) == Path("/home/somebody/.local/state/mpitrain/serve-80.key")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME to a folder of yours"):
        keys_of(tmp_path / "file" / "serve.key")
