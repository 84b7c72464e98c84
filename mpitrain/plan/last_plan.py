"""What `mpitrain plan` last said of a script: kept for this user, shown with the runs of the script."""

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
class LastPlan:
    """The last word of a `mpitrain plan`.

    Attributes:
        script: the file, with its whole path.
        arguments: of the script.
        at: when the plan was made, in seconds since the epoch.
        lines: the table of the best rows, the lines to run them and the sentence.
    """

    script: str
    arguments: list[str]
    at: float
    lines: list[str]


def keep_plan(script: Path, arguments: Sequence[str], lines: Sequence[str]) -> None:
    """Keep a plan in place of an earlier one of this script.

    Raises:
        MpitrainError: see keep_state.
    """
    plan = LastPlan(str(script.resolve()), list(arguments), time.time(), list(lines))
    keep_state(_file_of(script), _VERSION, asdict(plan))


def last_plan(script: Path) -> LastPlan | None:
    """Return the last plan of a script; None: there is none.

    Raises:
        DataError: see read_state; or the file has another form.
    """
    path = _file_of(script)
    content = read_state(path, _VERSION, _MOST_BYTES)
    if content is None:
        return None
    del content["version"]
    try:
        plan = LastPlan(**content)
        is_whole = all(
            isinstance(texts, list) and all(isinstance(text, str) for text in texts)
            for texts in ([plan.script], plan.arguments, plan.lines)
        ) and type(plan.at) in (int, float)
    except TypeError as error:
        raise DataError(f"{path} is damaged ({error!s:.200}). Remove it") from None
    if not is_whole:
        raise DataError(f"{path} is damaged: a field is not of its type. Remove it")
    return plan


def _file_of(script: Path) -> Path:
    name = hashlib.sha256(str(script.resolve()).encode(errors="surrogateescape")).hexdigest()
    return state_folder() / f"plan-{name[:32]}.json"
