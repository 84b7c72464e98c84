"""The last result of a command (`verify` or `plan`) for a script: kept for this user, shown with the runs of the
script."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mpitrain.errors import DataError
from mpitrain.reading import parsed
from mpitrain.state_files import keep_state, read_state, state_folder
from mpitrain.typed import made

_VERSION = 1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class LastWord:
    """The last lines that a command printed, and what it ran.

    Attributes:
        script: the absolute path of the file.
        arguments: of the script.
        at: when the command ended, in seconds since the epoch.
        lines: what the command printed at its end.
        is_equal: of verify: the runs were equal; None: one of them failed, so nothing was compared.
    """

    script: str
    arguments: list[str]
    at: float
    lines: list[str]
    is_equal: bool | None = None


def keep_word(
    command: str, script: Path, arguments: Sequence[str], lines: Sequence[str], *, is_equal: bool | None = None
) -> None:
    """Keep a command's last lines, in place of an earlier result for this script.

    Raises:
        MpitrainError: see keep_state.
    """
    word = LastWord(str(script.resolve()), list(arguments), time.time(), list(lines), is_equal)
    keep_state(_file_of(command, script), _VERSION, asdict(word))


def last_word(command: str, script: Path) -> LastWord | None:
    """Return a command's last result for a script; None: there is none.

    Raises:
        DataError: see read_state; or the file has another form.
    """
    path = _file_of(command, script)
    content = read_state(path, _VERSION, _MOST_BYTES)
    if content is None:
        return None
    del content["version"]
    word: LastWord = parsed(lambda: made(LastWord, content), DataError, str(path), "is damaged")
    return word


def _file_of(command: str, script: Path) -> Path:
    name = hashlib.sha256(str(script.resolve()).encode(errors="surrogateescape")).hexdigest()
    return state_folder() / f"{command}-{name[:32]}.json"
