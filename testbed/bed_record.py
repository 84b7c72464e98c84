"""The record of a bed: one JSON file in its folder. Each entry is written before the thing that it describes is made,
so `down` can remove what a killed `up` has left. Every name follows from the bed's name."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.reading import find_file, json_of, parsed
from mpitrain.typed import made

STATE = Path("/var/lib/mpitrain/testbed")
MOST_NODES = 64
_NAME = re.compile(r"[a-z][a-z0-9-]{0,23}")


@dataclass
class BedRecord:
    """A bed: its parts, and its present faults."""

    state: Path
    name: str
    full: bool  # True: User-mode Linux; False: containers
    num_nodes: int
    subnet: str  # the first three numbers of its addresses
    image: str  # folder in state/images
    snapshot: str | None = None  # folder in state/snapshots from which the nodes' disks started
    delay_microseconds: int = 0
    ready: bool = False  # True: `up` has completed
    faults: dict[str, dict[str, str]] = field(default_factory=dict)  # by node, then by kind of fault

    @property
    def folder(self) -> Path:
        """All files of the bed."""
        return self.state / "beds" / self.name

    @property
    def image_folder(self) -> Path:
        """The folder of the image from which the nodes' disks are made."""
        return self.state / "images" / self.image

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes; the first is the head."""
        return tuple(f"node{index + 1}" for index in range(self.num_nodes))

    @property
    def namespace(self) -> str:
        """The network namespace of the controller. The bridge is in it, and commands run in it."""
        return f"mpitrain-{self.name}"

    @property
    def controller(self) -> str:
        """The controller's address."""
        return f"{self.subnet}.254"

    @property
    def inventory(self) -> Path:
        """The inventory, for Ansible and for `mpitrain run`."""
        return self.folder / "hosts"

    @property
    def key(self) -> Path:
        """The controller's private key, with which it logs in as admin."""
        return self.image_folder / "key" / "id_ed25519"

    def node_folder(self, node: str) -> Path:
        """The node's disk and console log."""
        return self.folder / node

    def node_namespace(self, node: str) -> str:
        """The node's network namespace. Only container nodes have one."""
        return f"{self.namespace}-{node}"

    def address(self, node: str) -> str:
        """The node's address."""
        return f"{self.subnet}.{11 + self.names.index(self.checked(node))}"

    def checked(self, node: str) -> str:
        """Return `node` if there is a node of that name."""
        if node not in self.names:
            raise ConfigError(f"test bed {self.name} has no {node!r}; its nodes are {', '.join(self.names)}")
        return node

    def faults_of(self, node: str) -> dict[str, str]:
        """Return the present faults of a node, with their values."""
        # Another process may have added or undone a fault.
        self.faults = read_record(self.state, self.name).faults
        return dict(self.faults.get(self.checked(node), {}))

    def note_fault(self, node: str, fault: str, value: str = "") -> None:
        """Record a fault of a node."""
        self.faults[node] = self.faults_of(node) | {fault: value}
        self.write()

    def forget_fault(self, node: str, fault: str) -> None:
        """Remove a fault of a node from the record."""
        faults = self.faults_of(node)
        if faults.pop(fault, None) is not None:
            self.faults[node] = faults
            self.write()

    def write(self) -> None:
        """Write the record completely or not at all, also if the machine goes down now."""
        values = dataclasses.asdict(self)
        del values["state"]
        new = self.folder / f"record.{os.getpid()}"
        with new.open("w") as file:
            file.write(json.dumps(values, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / "record.json")


def read_record(state: Path, name: str) -> BedRecord:
    """Read the record of a bed.

    Raises:
        ConfigError: there is no bed of that name.
    """
    path = state / "beds" / name / "record.json"
    text = find_file(path, ConfigError)
    if text is None:
        known = ", ".join(bed_names(state)) or "none"
        raise ConfigError(f"there is no test bed {name!r} in {state}; known are: {known}")
    values = json_of(text, ConfigError, str(path))
    record: BedRecord = parsed(lambda: made(BedRecord, values, state=state), ConfigError, str(path), "is damaged")
    return record


def bed_names(state: Path) -> list[str]:
    """Return the names of all beds in a state folder, also of incomplete ones."""
    return sorted(path.parent.name for path in state.glob("beds/*/record.json"))


def read_records(state: Path) -> list[BedRecord]:
    """Return the records of all beds. A bed that goes down meanwhile may be left out."""
    records = []
    for name in bed_names(state):
        try:
            records.append(read_record(state, name))
        except ConfigError:
            if (state / "beds" / name / "record.json").exists():
                raise
    return records


def only_bed(state: Path) -> str:
    """Return the name of the only bed.

    Raises:
        ConfigError: there is no bed, or more than one.
    """
    names = bed_names(state)
    if not names:
        raise ConfigError("there is no test bed; make one: sudo scripts/testbed up 4")
    if len(names) > 1:
        raise ConfigError(f"there are several test beds; name one: --name {{{','.join(names)}}}")
    return names[0]


def new_name(state: Path) -> str:
    """Return bed1, or the next such name that is free on this machine."""
    number = 1
    while (state / "beds" / f"bed{number}").exists() or Path(f"/run/netns/mpitrain-bed{number}").exists():
        number += 1
    return f"bed{number}"


def checked_name(name: str, kind: str = "test bed") -> str:
    """Return `name` if it is valid.

    Raises:
        ConfigError: the name is not valid.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a {kind}: use at most 24 of a-z, 0-9 and -, a letter first")
    return name


def free_subnet(state: Path) -> str:
    """Return a subnet 10.77.x that no other bed has. Namespaces keep beds apart anyway, but users might mix them up."""
    used = {record.subnet for record in read_records(state)}
    for number in range(256):
        if f"10.77.{number}" not in used:
            return f"10.77.{number}"
    raise ConfigError("256 test beds are up; take one down first: scripts/testbed down --name NAME")


@contextmanager
def locked(path: Path, subject: str, *, timeout_seconds: float) -> Iterator[None]:
    """Hold a lock on a file, which is made if missing. The kernel releases the lock when the holder dies in any way.

    Raises:
        LaunchError: another process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + timeout_seconds
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"another scripts/testbed command uses {subject} for more than {timeout_seconds:g} s; "
                        f"it holds {path} (fuser {path} shows its process)"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
