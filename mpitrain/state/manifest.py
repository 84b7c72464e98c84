"""The manifest of a checkpoint: a JSON file with every value that is not an array, and a checksum of every other file.

The manifest is written last, and has a checksum of itself. If the manifest is complete and the files match it, the
checkpoint is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from mpitrain import __version__
from mpitrain.errors import CheckpointError
from mpitrain.reading import find_file, json_of, parsed, shown
from mpitrain.world.world import World

FILE = "manifest.json"
_FORMAT = 1
_MOST_BYTES = 1 << 30
_MOST_PARTS = 2**20


@dataclass(frozen=True)
class File:
    """One file of a checkpoint. The checksum is SHA-256, so `sha256sum` can check it too."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        step: number of steps made before the checkpoint was taken.
        run: identifies the training, also across resumes; each training has its own.
        score: the score by which the best checkpoint is kept; None if there is none.
        parts: number of ranks that wrote a part of their own beside the checkpoint; 0: none did.
        values: the values of the state that are not arrays, by flat name.
        files: the other files of the checkpoint, by name.
        information: information for people: versions, ranks, hosts, settings, time. Nothing depends on it.
    """

    step: int
    run: str = ""
    score: float | None = None
    parts: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    information: dict[str, Any] = field(default_factory=dict)


def to_text(manifest: Manifest) -> str:
    """Return the content of the file."""
    content = {"format": _FORMAT, **dataclasses.asdict(manifest)}
    return json.dumps({"manifest": content, "sha256": _checksum(content)}, indent=1) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint `path`.

    Raises:
        CheckpointError: the manifest is missing, unreadable or damaged.
    """
    called = f"{path}: {FILE}"
    text = find_file(path / FILE, CheckpointError, called=called, most_bytes=_MOST_BYTES)
    if text is None:
        raise CheckpointError(f"{path} has no {FILE}; it is incomplete, or not a checkpoint")
    content = json_of(text, CheckpointError, called, any_text=True, any_number=True)

    def fields_of_content() -> dict[str, Any]:
        if _checksum(content["manifest"]) != content["sha256"]:
            raise ValueError("its content does not have the checksum that it names")
        return dict(content["manifest"])

    def parse() -> Manifest:
        fields["files"] = {name: File(**fields_of_file) for name, fields_of_file in fields["files"].items()}
        manifest = Manifest(**fields)
        if problem := _problem(manifest):
            raise ValueError(problem)
        return manifest

    fields = parsed(fields_of_content, CheckpointError, called, "is damaged")
    if (number := fields.pop("format", None)) != _FORMAT:
        raise CheckpointError(f"{path} has format {shown(number)}; this version of mpitrain reads {_FORMAT}")
    manifest: Manifest = parsed(parse, CheckpointError, called, "is damaged")
    return manifest


def _problem(manifest: Manifest) -> str:
    """Describe a field with content that this module never writes; empty if there is none."""
    for name, kind in (("step", int), ("run", str), ("parts", int), ("values", dict), ("information", dict)):
        if type(getattr(manifest, name)) is not kind:
            return f"{name} is a {type(getattr(manifest, name)).__name__}; it must be a {kind.__name__}"
    if manifest.step < 0 or not 0 <= manifest.parts <= _MOST_PARTS:
        numbers = f"step is {manifest.step!r:.80}, parts is {manifest.parts!r:.80}"
        return f"{numbers}; allowed are 0 or more, and 0 to {_MOST_PARTS}"
    for label, number in (("score", manifest.score), ("loss", manifest.information.get("loss"))):
        if number is not None and (type(number) not in (int, float) or (type(number) is int and abs(number) >= 2**63)):
            return f"{label} is {number!r:.80}; it must be a number"
    for name, file in manifest.files.items():
        if Path(name).name != name or "\0" in name:
            return f"{name!r:.80} is a file; allowed is a name without folders"
        if type(file.bytes) is not int or not 0 <= file.bytes < 2**63 or type(file.sha256) is not str:
            return f"{name:.80} has {file.bytes!r:.80} bytes and the checksum {file.sha256!r:.80}"
    return ""


def information(world: World) -> dict[str, Any]:
    """Return information for people about the saving job. Nothing depends on it."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    return {
        "mpitrain": __version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "ranks": world.size,
        "nodes": world.num_nodes,
        "hosts": sorted(set(world.hosts)),
        "settings": {name: value for name, value in vars(world.config).items() if value != ""},
        "command": list(sys.argv),
        "script_sha256": file_checksum(script) if script is not None and script.is_file() else None,
    }


def now() -> str:
    """Return the time of this machine's clock, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content. Other threads keep running meanwhile."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
