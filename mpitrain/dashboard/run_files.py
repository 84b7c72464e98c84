"""The files of a run besides its record: its checkpoints, and the last results of `verify` and `plan` for its script.

No checkpoint is loaded. A path that is damaged, huge or not a file is named, and the rest is shown.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from mpitrain.errors import CheckpointError, DataError
from mpitrain.last_word import last_word
from mpitrain.state.manifest import FILE, read_manifest
from mpitrain.training.run_document import RunDocument
from mpitrain.training.writers.json_lines import plain_number

_MOST_FOLDERS = 8
_MOST_CHECKPOINTS = 100  # of a folder; the newest
_MOST_MANIFEST_BYTES = 8 << 20
_MOST_MANIFESTS = 1000
_MOST_LETTERS = 300  # of what is wrong with a checkpoint
_NAME = re.compile(r"step-(\d{8,18})(\.part-.*)?", re.ASCII | re.DOTALL)


def files_of(document: RunDocument | None) -> dict[str, Any]:
    """Return the checkpoints of each folder that the run names, and the last results of verify and plan."""
    if document is None:
        return {"folders": [], "verify": None, "verifyProblem": "", "plan": None, "planProblem": ""}
    folders = [_folder(Path(name)) for name in document.checkpoints[:_MOST_FOLDERS]]
    script = Path(document.folder, document.script)
    verified, problem = _last_word(script, "verify")
    planned, plan_problem = _last_word(script, "plan")
    return {
        "folders": folders, "verify": verified, "verifyProblem": problem, "plan": planned, "planProblem": plan_problem,
    }  # fmt: skip


def _last_word(script: Path, command: str) -> tuple[dict[str, Any] | None, str]:
    """Return the last result of a command for a script, or what is wrong with it."""
    try:
        word = last_word(command, script)
        return None if word is None else {**asdict(word), "isOld": _has_changed(script, word.at)}, ""
    except (DataError, OSError, ValueError, RuntimeError) as error:  # such as a circle of links
        return None, f"the last result of mpitrain {command} cannot be read: {error}"


def _has_changed(script: Path, since: float) -> bool:
    try:
        return script.stat().st_mtime > since
    except OSError:
        return False


def _folder(path: Path) -> dict[str, Any]:
    """Return the checkpoints of a folder, the newest first."""
    steps: dict[int, list[str]] = {}
    try:
        for name in os.listdir(path):  # noqa: PTH208 (names are wanted)
            if match := _NAME.fullmatch(name):
                steps.setdefault(int(match[1]), []).append(name)
    except FileNotFoundError:
        return _nothing(path, "is not on this machine: it is on another host, or was moved or removed")
    except (OSError, ValueError) as error:
        return _nothing(path, f"cannot be read: {error}")
    newest = sorted(steps, reverse=True)[:_MOST_CHECKPOINTS]
    shown = [_checkpoint(path, step, steps[step]) for step in newest]
    return {"folder": str(path), "problem": "", "checkpoints": shown, "more": len(steps) - len(newest)}


def _nothing(path: Path, problem: str) -> dict[str, Any]:
    return {"folder": str(path), "problem": problem, "checkpoints": [], "more": 0}


def _checkpoint(folder: Path, step: int, names: list[str]) -> dict[str, Any]:
    """Describe a checkpoint: `names` are its folder, and those of the parts that ranks have written beside it."""
    whole = next((name for name in names if ".part-" not in name), "")
    answer: dict[str, Any] = {"step": step, "bytes": None, "saved": None, "ranks": None, "loss": None, "score": None}
    try:
        answer["bytes"] = sum(_bytes_in(folder / name) for name in names)
        if not whole:
            raise CheckpointError("only parts of ranks are there; the rest has been removed, or was not written")
        about = (folder / whole / FILE).lstat()
        if not stat.S_ISREG(about.st_mode):
            raise CheckpointError(f"its {FILE} is not a file")
        answer["saved"] = about.st_mtime
        if about.st_size > _MOST_MANIFEST_BYTES:
            raise CheckpointError(f"its {FILE} has {about.st_size >> 20} MiB, and is not read here")
        facts, problem = _manifest(folder / whole, about.st_mtime_ns, about.st_size)
        if not problem and facts["step"] != step:
            problem = f"it holds step {facts['step']!r:.40}; was it renamed?"
        return {**answer, **facts, "step": step, "problem": problem}
    except FileNotFoundError:
        return {**answer, "problem": f"it has no {FILE}; it is incomplete, or has just been removed"}
    except CheckpointError as error:
        return {**answer, "problem": _short(error)}
    except OSError as error:
        return {**answer, "problem": f"it cannot be read: {error.strerror}"}


def _bytes_in(folder: Path) -> int:
    """Return the size of all files in a folder, not of those in folders below it."""
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))


def _short(error: CheckpointError) -> str:
    return f"{error!s:.{_MOST_LETTERS}}"


@lru_cache(_MOST_MANIFESTS)
def _manifest(path: Path, _changed: int, _size: int) -> tuple[dict[str, Any], str]:
    """Return what a manifest says, and what is wrong with it. Its time and its size tell it from a later one."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return {}, _short(error)
    ranks, loss = manifest.information.get("ranks"), manifest.information.get("loss")
    return {
        "step": manifest.step,
        "ranks": ranks if type(ranks) is int else None,
        "loss": None if loss is None else plain_number(loss),
        "score": None if manifest.score is None else plain_number(manifest.score),
    }, ""
