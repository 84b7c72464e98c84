"""Checkpoints on disk: arrays and numbers by name, never by rank; whole or not there at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy

from mpitrain.arrays import is_device_array
from mpitrain.errors import CheckpointError

# Separates the parts of a name in the archive. Parameter names may hold dots.
_SEPARATOR = "/"


def save(directory: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write `state` as `directory/step-00000100`; one rank calls it. Returns that path.

    It is written beside its final name, flushed to the disk and renamed, so a crash or a full disk leaves the
    earlier checkpoints as they were.

    Args:
        state: nested dicts with string keys around arrays (host or device), numbers, strings and None.

    Raises:
        CheckpointError: it could not be written; nothing of it is left.
    """
    final = directory / f"step-{step:08d}"
    temporary = directory / f".writing-{step:08d}-{os.getpid()}"
    replaced = directory / f".replaced-{step:08d}-{os.getpid()}"
    tensors = {name: value.get() if is_device_array(value) else value for name, value in _flatten(state)}
    numbers = {name: value for name, value in tensors.items() if not isinstance(value, numpy.ndarray)}
    try:
        _make_directory(directory)
        _clear_remains(directory, final)
        temporary.mkdir()
        with (temporary / "arrays.npz").open("wb") as file:
            numpy.savez(file, **{name: value for name, value in tensors.items() if name not in numbers})
            file.flush()
            os.fsync(file.fileno())
        with (temporary / "state.json").open("w") as file:
            json.dump(numbers, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(temporary)
        if final.exists():  # of an earlier run to this step; a directory can only be renamed to a free name
            final.rename(replaced)
        temporary.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        _sync_directory(directory)
    except BaseException as error:
        if replaced.exists() and not final.exists():
            with suppress(OSError):  # what went wrong first is what is raised
                replaced.rename(final)
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | TypeError | ValueError):  # the latter two: a value that JSON cannot hold
            raise CheckpointError(f"cannot write the checkpoint {final}: {error}") from error
        raise
    return final


def load(path: Path) -> dict[str, Any]:
    """The state that `save` wrote, with host arrays.

    Raises:
        CheckpointError: it is not there, incomplete or damaged.
    """
    try:
        numbers = json.loads((path / "state.json").read_text())
        # Opened here: NumPy would leave it open where an array is damaged.
        with (path / "arrays.npz").open("rb") as file, numpy.load(file, allow_pickle=False) as archive:
            tensors = {name: archive[name] for name in archive.files}  # checks each one's CRC
        return _unflatten({**numbers, **tensors})
    except Exception as error:  # zipfile, zlib, json and NumPy each have their own for a damaged file
        raise CheckpointError(f"cannot read the checkpoint {path}: {type(error).__name__}: {error}") from error


def latest(directory: Path) -> Path | None:
    """The checkpoint of the highest step in `directory`, or None.

    Raises:
        CheckpointError: `directory` is there but cannot be read. To begin anew would hide that.
    """
    try:
        found = [path for path in directory.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {directory}: {error}") from error
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def _make_directory(directory: Path) -> None:
    """Make it, and those above it that are missing, so that they survive a power cut."""
    if directory.exists():  # where it is a file, what follows says so
        return
    if directory.parent != directory:
        _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync_directory(directory.parent)


def _clear_remains(directory: Path, final: Path) -> None:
    """Clear away what killed runs left of this step. One rank of one job writes into `directory`."""
    step = final.name.removeprefix("step-")
    for remains in sorted(directory.glob(f".replaced-{step}-*")):
        if final.exists():
            shutil.rmtree(remains, ignore_errors=True)
        else:  # killed between the two renames: it is the only one of this step
            remains.rename(final)
    for remains in directory.glob(f".writing-{step}-*"):
        shutil.rmtree(remains, ignore_errors=True)


def _flatten(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if _SEPARATOR in key:
            raise CheckpointError(f"the name {key!r} holds {_SEPARATOR!r}, which checkpoints use themselves")
        if isinstance(value, Mapping):
            yield from _flatten(value, prefix + key + _SEPARATOR)
        else:
            yield prefix + key, value


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(_SEPARATOR)
        place = state
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return state


def _sync_directory(directory: Path) -> None:
    """Make the rename itself survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
