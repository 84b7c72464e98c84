"""Snapshots: the disks of a whole bed, kept under a name. Set up once, then start from there in seconds.

snapshots/NAME/snapshot.json describes the bed, snapshots/NAME/nodeN is node N's disk. The disk of a container holds
only what was written since its bed was made, so the snapshot from which that bed started is needed too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.reading import find_file, json_of, parsed
from mpitrain.typed import made
from testbed import processes
from testbed.bed_record import BedRecord, checked_name, read_records
from testbed.node import Node


@dataclass(frozen=True)
class Snapshot:
    """The properties that a bed needs to start from a snapshot, because addresses are in files of the nodes."""

    full: bool
    num_nodes: int
    subnet: str
    image: str
    base: str | None  # the snapshot from which its own bed started


def snapshot_names(state: Path) -> list[str]:
    """All snapshots."""
    return sorted(path.parent.name for path in state.glob("snapshots/*/snapshot.json"))


def read_snapshot(state: Path, name: str) -> Snapshot:
    """Read the description of a snapshot.

    Raises:
        ConfigError: there is no snapshot of that name.
    """
    path = state / "snapshots" / name / "snapshot.json"
    text = find_file(path, ConfigError)
    if text is None:
        known = ", ".join(snapshot_names(state)) or "none"
        raise ConfigError(f"there is no snapshot {name!r} in {state}; known are: {known}")
    values = json_of(text, ConfigError, str(path))
    snapshot: Snapshot = parsed(lambda: made(Snapshot, values), ConfigError, str(path), "is damaged")
    return snapshot


def save(record: BedRecord, nodes: Mapping[str, Node], name: str) -> None:
    """Keep the present disks of all nodes of a bed. The nodes are up, and are frozen meanwhile.

    Raises:
        ConfigError: the name is not valid, or is taken.
    """
    folder = _new_folder(record, name)
    try:
        for machine in nodes.values():
            machine.flush()
        cgroups = [processes.group(record.name, node) for node in nodes]
        try:
            for group in cgroups:
                processes.freeze(group, True)
            for node, machine in nodes.items():
                machine.save(folder / node)
        finally:
            for group in cgroups:
                processes.freeze(group, False)
        base = None if record.full else record.snapshot
        snapshot = Snapshot(record.full, record.num_nodes, record.subnet, record.image, base)
        (folder / "snapshot.json").write_text(json.dumps(asdict(snapshot), indent=2) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _new_folder(record: BedRecord, name: str) -> Path:
    """Make the empty folder of a new snapshot of a bed. Without snapshot.json, it does not count yet."""
    folder = record.state / "snapshots" / checked_name(name, "snapshot")
    if (folder / "snapshot.json").exists():
        raise ConfigError(f"there is already a snapshot {name}; remove it first: scripts/testbed forget {name}")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed save
    for node in record.names:
        (folder / node).mkdir(parents=True)
    return folder


def forget_snapshot(state: Path, name: str) -> None:
    """Remove a snapshot.

    Raises:
        ConfigError: there is no snapshot of that name, or a bed or another snapshot uses it.
    """
    read_snapshot(state, name)
    users = [f"test bed {record.name}" for record in read_records(state) if record.snapshot == name]
    users += [f"snapshot {other}" for other in snapshot_names(state) if read_snapshot(state, other).base == name]
    if users:
        raise ConfigError(f"snapshot {name} is in use by {', '.join(users)}")
    (state / "snapshots" / name / "snapshot.json").unlink()
    shutil.rmtree(state / "snapshots" / name)


def snapshot_layers(record: BedRecord, node: str) -> list[Path]:
    """Return a container's disks in the bed's snapshot and in those that it is based on, the newest first."""
    layers = []
    name = record.snapshot
    while name is not None:
        layers.append(record.state / "snapshots" / name / node)
        name = read_snapshot(record.state, name).base
    return layers
