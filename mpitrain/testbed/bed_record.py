"""What a bed is, in one JSON file in its folder. It is written before the thing it tells of is made, so that `down`
can remove what an `up` that was killed half-way has left. Every name follows from the bed's name."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError, LaunchError

STATE = Path("/var/lib/mpitrain/testbed")
MOST_NODES = 64
_NAME = re.compile(r"[a-z][a-z0-9-]{0,23}")


@dataclass
class BedRecord:
    """A bed: what it is made of, and which faults are in force."""

    state: Path
    name: str
    full: bool  # User-mode Linux; else containers
    num_nodes: int
    subnet: str  # the first three numbers of its addresses
    image: str  # folder in state/images
    snapshot: str | None = None  # folder in state/snapshots that the nodes' disks started from
    delay_microseconds: int = 0
    ready: bool = False  # `up` came to its end
    faults: dict[str, dict[str, str]] = field(default_factory=dict)  # by node, then by kind of fault

    @property
    def folder(self) -> Path:
        """All files of the bed."""
        return self.state / "beds" / self.name

    @property
    def image_folder(self) -> Path:
        """What the nodes' disks are made from."""
        return self.state / "images" / self.image

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes; the first is the head."""
        return tuple(f"node{index + 1}" for index in range(self.num_nodes))

    @property
    def namespace(self) -> str:
        """The network namespace of the controller: where the bridge is, and where commands run."""
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
        """The node's network namespace; container nodes only."""
        return f"{self.namespace}-{node}"

    def address(self, node: str) -> str:
        """The node's address."""
        return f"{self.subnet}.{11 + self.names.index(self.checked(node))}"

    def checked(self, node: str) -> str:
        """`node`, if there is one of that name."""
        if node not in self.names:
            raise ConfigError(f"test bed {self.name} has no {node!r}; its nodes are {', '.join(self.names)}")
        return node

    def faults_of(self, node: str) -> dict[str, str]:
        """What is broken on a node now, with the values that it was broken with."""
        # Another process may have broken or mended something.
        self.faults = read_record(self.state, self.name).faults
        return dict(self.faults.get(self.checked(node), {}))

    def note_fault(self, node: str, fault: str, value: str = "") -> None:
        """From now on this is broken on a node."""
        self.faults[node] = self.faults_of(node) | {fault: value}
        self.write()

    def forget_fault(self, node: str, fault: str) -> None:
        """From now on it is not."""
        faults = self.faults_of(node)
        if faults.pop(fault, None) is not None:
            self.faults[node] = faults
            self.write()

    def write(self) -> None:
        """Keep it; whole or not at all, also if the machine goes down now."""
        values = dataclasses.asdict(self)
        del values["state"]
        new = self.folder / f"record.{os.getpid()}"
        with new.open("w") as file:
            file.write(json.dumps(values, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / "record.json")


def read_record(state: Path, name: str) -> BedRecord:
    """The record of a bed.

    Raises:
        ConfigError: there is no bed of that name.
    """
    try:
        values: dict[str, Any] = json.loads((state / "beds" / name / "record.json").read_text())
    except FileNotFoundError:
        known = ", ".join(bed_names(state)) or "none"
        raise ConfigError(f"there is no test bed {name!r} in {state}; known are: {known}") from None
    return BedRecord(state=state, **values)


def bed_names(state: Path) -> list[str]:
    """All beds in a state folder, also those that are half made."""
    return sorted(path.parent.name for path in state.glob("beds/*/record.json"))


def read_records(state: Path) -> list[BedRecord]:
    """The records of all beds; one that goes down meanwhile may be left out."""
    records = []
    for name in bed_names(state):
        with suppress(ConfigError):
            records.append(read_record(state, name))
    return records


def only_bed(state: Path) -> str:
    """The name of the one bed that there is.

    Raises:
        ConfigError: there is none, or more than one.
    """
    names = bed_names(state)
    if not names:
        raise ConfigError("there is no test bed; make one: sudo mpitrain testbed up 4")
    if len(names) > 1:
        raise ConfigError(f"there are several test beds, say which: --name {{{','.join(names)}}}")
    return names[0]


def new_name(state: Path) -> str:
    """bed1, or the first one after it that is free on this machine."""
    number = 1
    while (state / "beds" / f"bed{number}").exists() or Path(f"/run/netns/mpitrain-bed{number}").exists():
        number += 1
    return f"bed{number}"


def checked_name(name: str, kind: str = "test bed") -> str:
    """`name`, if it can be one.

    Raises:
        ConfigError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a {kind}: use at most 24 of a-z, 0-9 and -, a letter first")
    return name


def free_subnet(state: Path) -> str:
    """10.77.x that no other bed has. They would not meet, each being in a namespace; people might mix them up."""
    used = {record.subnet for record in read_records(state)}
    for number in range(256):
        if f"10.77.{number}" not in used:
            return f"10.77.{number}"
    raise ConfigError("256 test beds are up; take one down first: mpitrain testbed down --name NAME")


@contextmanager
def locked(path: Path, subject: str, *, timeout_seconds: float) -> Iterator[None]:
    """Hold a lock on a file, which is made. The kernel lets go of it when the holder dies, however it dies.

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
                        f"another mpitrain testbed command works on {subject} for more than {timeout_seconds:g} s; "
                        f"it holds {path} (fuser {path} names it)"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
