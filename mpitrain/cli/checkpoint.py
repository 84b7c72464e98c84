"""`mpitrain checkpoint`: show and verify checkpoints, and export the parameters to plain files."""

from __future__ import annotations

import argparse
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.cli.terminal_text import print_object
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.reading import is_file, is_folder

if TYPE_CHECKING:
    import numpy

    from mpitrain.state.store import StoredCheckpoint

HELP = "list, show, verify and export checkpoints"
PAGE = "how-to/trainer-and-data.md"

_EPILOG = """\
PATH is a checkpoint, or a directory of checkpoints. For a directory, show and
export take the newest complete checkpoint, and verify reads all of them. The exit
code is 1 if a checkpoint that was read is damaged.

  mpitrain checkpoint ls runs
  mpitrain checkpoint verify runs
  mpitrain checkpoint export runs model.safetensors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (
        ("ls", "list the checkpoints of a directory, newest first; reads only their manifests"),
        ("show", "show the contents of a checkpoint, and the job that wrote it"),
        ("verify", "compare every file with its checksum"),
        ("export", "write only the parameters, by name, as FILE.safetensors or FILE.npz"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        action.add_argument("path", metavar="PATH", type=Path)
        if name == "export":
            action.add_argument("file", metavar="FILE", type=Path)
        else:
            action.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Do the action. Return the exit code."""
    if arguments.action == "export":
        return _export(arguments.path, arguments.file)
    return {"ls": _list, "show": _show, "verify": _verify}[arguments.action](arguments.path, as_json=arguments.json)


def _list(path: Path, *, as_json: bool) -> int:
    checkpoints = _checkpoints(path)
    if as_json:
        whole = [
            {
                "path": str(entry.path),
                "step": entry.step,
                "bytes": sum(file.bytes for file in entry.manifest.files.values()),
                "score": entry.manifest.score,
                **entry.manifest.information,
            }
            for entry in checkpoints
            if entry.manifest
        ]
        damaged = [str(entry.problem) for entry in checkpoints if entry.problem]
        print_object({"checkpoints": whole, "damaged": damaged})
        return int(bool(damaged))
    rows = [("step", "saved (UTC)", "MB", "ranks", "loss", "score")]
    for entry in checkpoints:
        if entry.manifest:
            about, score = entry.manifest.information, entry.manifest.score
            rows.append(
                (
                    str(entry.step),
                    str(about.get("saved", "")).rstrip("Z").replace("T", " "),
                    f"{sum(file.bytes for file in entry.manifest.files.values()) / 1e6:.1f}",
                    str(about.get("ranks", "")),
                    f"{about['loss']:.6g}" if "loss" in about else "",
                    "" if score is None else f"{score:.6g}",
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    for entry in checkpoints:
        if entry.problem:
            print(f"damaged: {entry.problem}")
    return int(any(entry.problem for entry in checkpoints))


def _show(path: Path, *, as_json: bool) -> int:
    from safetensors import safe_open

    from mpitrain.state.store import TENSORS, verify

    path = _newest(path)
    manifest = verify(path)
    about = {"step": manifest.step, "training": manifest.run, "score": manifest.score, **manifest.information}
    with safe_open(path / TENSORS, framework="np") as file:
        slices = {name: file.get_slice(name) for name in sorted(file.keys())}
        tensors = {name: (one.get_dtype(), list(one.get_shape())) for name, one in slices.items()}
    if as_json:
        content = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()}
        print_object({"path": str(path), **about, "tensors": content, "values": dict(manifest.values)})
        return 0
    print(path)
    lines = [(name, _text(value)) for name, value in about.items() if value is not None]
    lines += [(name, f"{dtype} {tuple(shape)}") for name, (dtype, shape) in tensors.items()]
    lines += [(name, repr(value)) for name, value in manifest.values.items()]
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"  {name:<{width}}  {text}")
    return 0


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={entry}" for name, entry in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _verify(path: Path, *, as_json: bool) -> int:
    from mpitrain.state.resume import part_name
    from mpitrain.state.store import verify

    whole, damaged = [], []
    for entry in _checkpoints(path):
        size = entry.manifest.parts if entry.manifest else 0
        for part in [entry.path, *(entry.path.parent / part_name(entry.step, rank, size) for rank in range(size))]:
            try:
                verify(part)
                whole.append(str(part))
                line = f"{part}: whole"
            except CheckpointError as error:
                damaged.append(str(error))
                line = f"damaged: {error}"
            if not as_json:
                print(line)
    if as_json:
        print_object({"whole": whole, "damaged": damaged})
    return int(bool(damaged))


def _export(path: Path, file: Path) -> int:
    from mpitrain.arrays import is_array
    from mpitrain.state.store import read

    if file.suffix not in (".safetensors", ".npz"):
        raise ConfigError(f"{file} ends in {file.suffix or 'nothing'}; it must be .safetensors or .npz")
    path = _newest(path)
    manifest, state = read(path)
    adapter = state.get("adapter")
    parameters = adapter.get("parameters") if isinstance(adapter, dict) else None
    if not isinstance(parameters, dict) or not parameters or not all(map(is_array, parameters.values())):
        raise CheckpointError(f"{path} holds no parameters; was it written by a Trainer?")
    # In a round of LocalSGD, those of the adapter are rank 0's alone.
    parameters = {**parameters, **_common(state)}
    _write(file, parameters)
    count = sum(value.size for value in parameters.values())
    print(f"{file}: {len(parameters)} parameters, {count:,} numbers, of step {manifest.step}")
    return 0


def _common(state: Mapping[str, Any]) -> dict[str, numpy.ndarray]:
    """Return the parameters of the last outer step, for a checkpoint from the middle of a round; else {}."""
    strategy = state.get("strategy")
    begun = strategy.get("round") if isinstance(strategy, dict) else None
    common = begun.get("parameters") if isinstance(begun, dict) else None
    return common if isinstance(common, dict) else {}


def _write(file: Path, parameters: Mapping[str, numpy.ndarray]) -> None:
    """Write the file completely or not at all: an existing file stays until the new one is complete."""
    import numpy
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    temporary = file.with_name(f".writing-{os.getpid()}-{file.name}")
    try:
        if file.suffix == ".npz":
            odd = [name for name, value in parameters.items() if value.dtype.kind == "V"]
            if odd:
                raise ConfigError(
                    f"{odd[0]} is {parameters[odd[0]].dtype}, which NumPy's files cannot hold; export to .safetensors"
                )
            with zipfile.ZipFile(temporary, "w") as archive:  # numpy.savez cannot hold a parameter called `file`
                for name, value in parameters.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        numpy.lib.format.write_array(member, value, allow_pickle=False)
        else:
            save_file(dict(parameters), temporary, {"format": "np"})
        temporary.replace(file)
    except (OSError, SafetensorError) as error:  # the library raises SafetensorError for a full disk
        raise CheckpointError(f"cannot write {file}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _newest(path: Path) -> Path:
    """Return the checkpoint itself, or the newest one in a directory whose files are complete."""
    from mpitrain.state.store import verify

    problems = []
    for entry in _checkpoints(path):
        try:
            verify(entry.path)
            return entry.path
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError("; ".join(problems))


def _checkpoints(path: Path) -> list[StoredCheckpoint]:
    from mpitrain.state.manifest import FILE
    from mpitrain.state.store import entries

    if not is_folder(path):
        raise CheckpointError(f"{path} does not exist, or is not a directory")
    if path.name.startswith("step-") or is_file(path / FILE):
        # The checkpoint has its real name here, whatever path was given.
        same_name = [entry for entry in entries(path.resolve().parent) if entry.path.name == path.resolve().name]
        if same_name:
            return same_name
    checkpoints = entries(path)
    if not checkpoints:
        raise CheckpointError(f"there are no checkpoints in {path}; their names have the form step-00000100")
    return checkpoints
