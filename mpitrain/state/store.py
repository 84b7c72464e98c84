"""A directory of checkpoints, each a directory `step-00000100` with `tensors.safetensors` and `manifest.json`.

Each is written under a temporary name beside its final one, flushed to the disk and renamed. So a crash or a full disk
does not change earlier checkpoints. One job at a time uses a directory; in that job, each name has one writer.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from safetensors import SafetensorError
from safetensors.numpy import load_file

from mpitrain.arrays import is_device_array
from mpitrain.errors import CheckpointError
from mpitrain.state.manifest import FILE, Manifest, file_checksum, read_manifest, to_text
from mpitrain.state.names import join, split
from mpitrain.state.tensors import write_tensors
from mpitrain.watching.activity import note_checkpoint

TENSORS = "tensors.safetensors"


@dataclass(frozen=True)
class StoredCheckpoint:
    """The content of a directory with a checkpoint's name: a manifest, or the reason why it has none."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str = ""


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def save(directory: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write `state` as the checkpoint of `step`, wait for the disk, and return the path. One rank calls this.

    Args:
        state: nested dicts with string keys; the leaves are arrays (CPU or GPU), numbers, strings, None, and lists
            of them.

    Raises:
        CheckpointError: the checkpoint could not be written; nothing of it is left.
    """
    tensors, values = split(state)
    on_host = {name: value.get() if is_device_array(value) else value for name, value in tensors.items()}
    return write(directory, name_of(step), Manifest(step, values=values), on_host)


def load(path: Path) -> dict[str, Any]:
    """Compare all checksums of a checkpoint, and return its state with CPU arrays.

    Raises:
        CheckpointError: it is not there, incomplete or damaged.
    """
    return read(path)[1]


def latest(directory: Path) -> Path | None:
    """Return the checkpoint of the highest step in `directory` that has a complete manifest, or None.

    Raises:
        CheckpointError: `directory` exists but cannot be read. Starting over would hide that.
    """
    return next((entry.path for entry in entries(directory) if entry.manifest), None)


def entries(directory: Path) -> list[StoredCheckpoint]:
    """Return all checkpoints in `directory`, newest first; none if it does not exist. Read only the manifests.

    Raises:
        CheckpointError: `directory` exists but cannot be read.
    """
    result = []
    for name in _names(directory):
        if not re.fullmatch(r"step-\d{8,}", name):
            continue
        path, step = directory / name, int(name.removeprefix("step-"))
        try:
            manifest = read_manifest(path)
            if manifest.step != step:
                raise CheckpointError(f"{path} holds step {manifest.step}; was it renamed?")
            result.append(StoredCheckpoint(path, step, manifest))
        except CheckpointError as error:
            result.append(StoredCheckpoint(path, step, None, str(error)))
    return sorted(result, key=lambda entry: -entry.step)


def half_written(directory: Path) -> list[Path]:
    """Return what killed writers have left. Nothing reads it, and the next writer of that name removes it."""
    return [directory / name for name in sorted(_names(directory)) if name.startswith(".writing-")]


def verify(path: Path) -> Manifest:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: it is not there, incomplete or damaged.
    """
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != expected.bytes:
                raise CheckpointError(f"{file} has {size} bytes, its manifest says {expected.bytes}")
            if file_checksum(file) != expected.sha256:
                raise CheckpointError(f"{file} is damaged: its content does not have the checksum of the manifest")
        except FileNotFoundError:
            raise CheckpointError(f"{path} has no {name}, which its manifest names") from None
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    return manifest


def read(path: Path) -> tuple[Manifest, dict[str, Any]]:
    """Return a checkpoint's manifest and its state. Raises the errors of `load`."""
    manifest = verify(path)
    try:
        tensors = load_file(path / TENSORS)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path / TENSORS} cannot be read: {type(error).__name__}: {error}") from None
    return manifest, join({**manifest.values, **tensors})


def write(directory: Path, name: str, manifest: Manifest, tensors: Mapping[str, numpy.ndarray]) -> Path:
    """Write `directory/name`, and replace an existing one. This fills in the files of `manifest`.

    Raises:
        CheckpointError: the checkpoint could not be written; nothing of it is left, and an existing one is unchanged.
    """
    final = directory / name
    temporary = directory / f".writing-{name}-{os.getpid()}"
    replaced = directory / f".replaced-{name}-{os.getpid()}"
    try:
        make_directory(directory)
        _clear_remains(directory, name)
        temporary.mkdir()
        files = {TENSORS: write_tensors(temporary / TENSORS, tensors)}
        (temporary / FILE).write_text(to_text(replace(manifest, files=files)))
        _sync(temporary / FILE)
        _sync(temporary)
        if final.exists():  # an earlier run made this step; a directory can only be renamed to a free name
            final.rename(replaced)
        temporary.rename(final)
        _remove_tree(replaced)
        _sync(directory)
        note_checkpoint()
    except BaseException as error:
        if replaced.exists() and not final.exists():
            with suppress(OSError):  # the first error is the one to raise
                replaced.rename(final)
        _remove_tree(temporary)
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write the checkpoint {final}: {error}") from error
        raise
    return final


def remove(path: Path) -> None:
    """Remove a checkpoint. A half-removed checkpoint does not count as one.

    Raises:
        OSError: the checkpoint cannot be removed.
    """
    doomed = path.parent / f".removing-{path.name}-{os.getpid()}"
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return  # another rank was faster
    shutil.rmtree(doomed)


def prune(directory: Path, keep: int, trusted: Collection[int]) -> None:
    """Remove all but the `keep` newest checkpoints and the one of the highest score.

    Args:
        trusted: steps that this job has written or resumed from. They are kept before all others: an unreadable
            checkpoint of a higher step must not displace them.

    Raises:
        OSError: a checkpoint cannot be removed.
    """
    whole = [entry for entry in entries(directory) if entry.manifest]
    newest = sorted(whole, key=lambda entry: (entry.step in trusted, entry.step), reverse=True)
    kept = {entry.step for entry in newest[:keep]}
    scores = {entry.step: entry.manifest.score for entry in newest if entry.manifest}
    scored = [(score, step) for step, score in scores.items() if score is not None and score == score]
    if scored:
        kept.add(max(scored)[1])
    for entry in whole:
        if entry.step not in kept:
            remove(entry.path)


def make_directory(directory: Path) -> None:
    """Make the directory and its missing parents, so that they survive a power cut."""
    if directory.exists():  # if it is a file, the caller's next step fails with an error
        return
    if directory.parent != directory:
        make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync(directory.parent)


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {directory}: {error.strerror or error}") from error


def _clear_remains(directory: Path, name: str) -> None:
    """Remove what killed runs have left, of a checkpoint of any step or of a rank's part of any step."""
    of_any_step = re.compile(re.sub(r"\\-\d+", r"\\-\\d+", re.escape(name), count=1))
    for remains in _names(directory):
        kind, _, rest = remains.removeprefix(".").partition("-")
        its_name = rest.rpartition("-")[0]
        if kind not in ("writing", "replaced", "removing") or not of_any_step.fullmatch(its_name):
            continue
        if kind == "replaced" and not (directory / its_name).exists():
            (directory / remains).rename(directory / its_name)  # killed between the two renames: this is the only copy
        else:
            _remove_tree(directory / remains)


def _remove_tree(path: Path) -> None:
    """Remove as much as possible; the next save removes the rest."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:  # a file has that name
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
