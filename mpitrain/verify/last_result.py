"""What `mpitrain verify` last said of a script: kept for this user, shown with the runs of the script."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mpitrain.errors import DataError
from mpitrain.state_files import keep_state, read_state, state_folder

_VERSION = 1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class VerifyResult:
    """The end of a `mpitrain verify`.

    Attributes:
        script: the file, with its whole path.
        arguments: of the script.
        at: when verify ended, in seconds since the epoch.
        is_equal: the runs were equal; None: one of them failed, so nothing was compared.
        lines: what verify printed of the comparison.
    """

    script: str
    arguments: list[str]
    at: float
    is_equal: bool | None
    lines: list[str]


def keep_result(script: Path, arguments: Sequence[str], lines: Sequence[str], *, is_equal: bool | None) -> None:
    """Keep a result in place of an earlier one of this script.

    Raises:
        MpitrainError: see keep_state.
    """
    result = VerifyResult(str(script.resolve()), list(arguments), time.time(), is_equal, list(lines))
    keep_state(_file_of(script), _VERSION, asdict(result))


def last_result(script: Path) -> VerifyResult | None:
    """Return the last result of a script; None: there is none.

    Raises:
        DataError: see read_state; or the file has another form.
    """
    path = _file_of(script)
    content = read_state(path, _VERSION, _MOST_BYTES)
    if content is None:
        return None
    del content["version"]
    try:
        result = VerifyResult(**content)
    except TypeError as error:
        raise DataError(f"{path} is damaged ({error!s:.200}). Remove it") from None
    texts = [result.script, *result.arguments, *result.lines] if _are_lists(result) else [None]
    is_time = type(result.at) in (int, float)
    if not (is_time and result.is_equal in (True, False, None) and all(isinstance(text, str) for text in texts)):
        raise DataError(f"{path} is damaged: a field is not of its type. Remove it")
    return result


def _are_lists(result: VerifyResult) -> bool:
    return isinstance(result.arguments, list) and isinstance(result.lines, list)


def _file_of(script: Path) -> Path:
    name = hashlib.sha256(str(script.resolve()).encode(errors="surrogateescape")).hexdigest()
    return state_folder() / f"verify-{name[:32]}.json"
