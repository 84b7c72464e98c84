"""Small files in which commands keep their results, for this user and for `mpitrain dashboard`.

They are in `~/.local/state/mpitrain` (XDG_STATE_HOME moves it), one JSON object each, with the version of its format.
Each is replaced atomically, so that none is ever half written.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.errors import DataError, MpitrainError
from mpitrain.reading import find_file, json_of, shown

_ROOM_BYTES = 1 << 20  # more than a report of a large cluster


def state_folder() -> Path:
    """Return the folder of this user's state. Machines with a common home folder share it.

    Raises:
        DataError: this user has no home folder, and XDG_STATE_HOME is not set.
    """
    return _users_folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    """Return the folder for what this user can produce again. Machines with a common home folder share it.

    Raises:
        DataError: this user has no home folder, and XDG_CACHE_HOME is not set.
    """
    return _users_folder("XDG_CACHE_HOME", ".cache")


def _users_folder(variable: str, below_home: str) -> Path:
    """Return mpitrain's folder, in the folder that the variable names or else in one below the home folder."""
    try:
        base = os.environ.get(variable) or str(Path.home() / below_home)
    except RuntimeError:
        raise DataError(
            f"results are kept in ~/{below_home}/mpitrain, but HOME is not set, and the user {os.getuid()} has no "
            f"entry with a home folder. Set {variable} to a folder of yours"
        ) from None
    return Path(base) / "mpitrain"


def keep_state(path: Path, version: int, content: Mapping[str, Any]) -> None:
    """Replace the file at `path` with this content, readable by this user only. Make missing folders.

    Raises:
        MpitrainError: the file cannot be written. An earlier one is unchanged.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".writing-{path.name}-")  # with mode 600
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"version": version, **content}, file)
                file.flush()
                os.fsync(descriptor)
            Path(name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise MpitrainError(
            f"{path} cannot be written, so `mpitrain dashboard` does not show this result: {error.strerror}. Set "
            "XDG_STATE_HOME to a folder of yours"
        ) from None


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file, readable by this user only if it is new. Whatever happens, it has either the old or the new
    content."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def why_nothing_is_kept() -> str:
    """Return why `keep_state` would fail in this user's folder now; empty if it would succeed."""
    try:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    return ""


def read_state(path: Path, version: int, most_bytes: int) -> dict[str, Any] | None:
    """Return the content of a file that `keep_state` has written; None: there is none.

    Args:
        path: the file.
        version: the newest format that the caller can read.
        most_bytes: a larger file is refused.

    Raises:
        DataError: the file cannot be read, is damaged, of a newer format, or too large.
    """
    text = find_file(path, DataError, most_bytes=most_bytes)
    if text is None:
        return None

    def refusal(said: str) -> DataError:
        return DataError(f"{said}. Remove it")

    content = json_of(text, refusal, str(path), any_text=True)
    number = content.get("version")
    if type(number) is not int or number < 1:
        raise refusal(f"{path} is damaged: its version is {shown(number)}")
    if number > version:
        raise DataError(f"{path} is of version {number}; this mpitrain reads up to {version}. Update mpitrain")
    return content
