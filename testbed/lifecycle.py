"""The making of a bed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from mpitrain.errors import ConfigError
from testbed import bed_record as records
from testbed import controller, host, network, snapshots
from testbed.bed import MOST_DELAY_MICROSECONDS, Bed, down, remove_bed, working_on
from testbed.bed_record import STATE, BedRecord, locked
from testbed.image import build_full_image, build_image

_LOCK_SECONDS = 60.0


def _silent(_: str) -> None:
    pass


def build(*, full: bool = False, state: Path = STATE, say: Callable[[str], None] = _silent) -> str:
    """Install what a bed needs, and make the nodes' image unless it exists. Return the image's name.

    Raises:
        ConfigError: the user is not root, or the state folder belongs to another user.
        LaunchError: the machine lacks something, or a tool failed.
    """
    host.require_root()
    host.require_kernel(full=full, delay=False)
    host.require_own_folder(state)
    host.require_real_disk(state)
    host.install_packages(full=full, say=say)
    image = build_image(state, say)
    if full:
        build_full_image(state / "images" / image, say)
    return image


def up(
    num_nodes: int | None = None,
    *,
    full: bool = False,
    name: str | None = None,
    snapshot: str | None = None,
    delay_microseconds: int = 0,
    state: Path = STATE,
    say: Callable[[str], None] = _silent,
) -> Bed:
    """Make a bed, and wait until users can log in on all its nodes. On an error, remove the incomplete bed.

    Args:
        num_nodes: the number of nodes, 1 to 64; None: as many as the snapshot has.
        full: make nodes with their own kernels (User-mode Linux) instead of containers.
        name: the bed's name; None: bed1, or the next such name that is free.
        snapshot: start from disks that `Bed.save` kept.
        delay_microseconds: the delay of every cable, in each direction.
        state: the folder for images, snapshots and beds.
        say: is called with a text about each step that takes longer.

    Raises:
        ConfigError: the user is not root, a value is not allowed, or the name is taken.
        LaunchError: the machine lacks something, or a node did not come up.
    """
    host.require_root()
    host.require_kernel(full=full, delay=delay_microseconds > 0)
    if not 0 <= delay_microseconds <= MOST_DELAY_MICROSECONDS:
        raise ConfigError(f"a delay of {delay_microseconds} us; it must be 0 to {MOST_DELAY_MICROSECONDS}")
    if name is not None:
        records.checked_name(name)
    if snapshot is not None:
        kept = snapshots.read_snapshot(state, snapshot)
        if num_nodes not in (None, kept.num_nodes) or full != kept.full:
            kind = "full" if kept.full else "fast"
            raise ConfigError(f"snapshot {snapshot} is of a {kind} bed of {kept.num_nodes} nodes")
        num_nodes, image, subnet = kept.num_nodes, kept.image, kept.subnet
    else:
        if num_nodes is None or not 1 <= num_nodes <= records.MOST_NODES:
            raise ConfigError(f"number of nodes: {num_nodes}; it must be 1 to {records.MOST_NODES}")
        image = subnet = ""
    if not full:
        host.require_inotify(num_nodes)
    image = image or build(full=full, state=state, say=say)
    if name is not None:
        _remove_unfinished(state, name, say)
    with locked(state / "lock", str(state), timeout_seconds=_LOCK_SECONDS):
        name = name or records.new_name(state)
        if Path("/run/netns", f"mpitrain-{name}").exists():
            raise ConfigError(f"there is already a network namespace mpitrain-{name}; use another --name")
        record = BedRecord(
            state=state,
            name=name,
            full=full,
            num_nodes=num_nodes,
            subnet=subnet or records.free_subnet(state),
            image=image,
            snapshot=snapshot,
            delay_microseconds=delay_microseconds,
        )
        record.folder.mkdir(parents=True)
        record.write()
    with working_on(record):
        try:
            return _bring_up(record)
        except BaseException:
            remove_bed(record)
            raise


def _bring_up(record: BedRecord) -> Bed:
    bed = Bed(record)
    network.make_controller(record)
    controller.start_repository(record)
    for name in record.names:
        bed.node(name).create()
        bed.node(name).start()
    bed.wait(record.names)
    controller.wait_for_repository(record)
    controller.write_files(record, bed.host_keys())
    for name in record.names:
        bed.restore_network(name)
    record.ready = True
    record.write()
    return bed


def find(name: str | None = None, *, state: Path = STATE) -> Bed:
    """Find a bed that is up; without a name, the only one.

    Raises:
        ConfigError: the user is not root; there is no such bed, none at all, or several; its `up` has not completed; or
            the machine was restarted since.
    """
    host.require_root()
    record = records.read_record(state, name or records.only_bed(state))
    if not record.ready:
        raise ConfigError(
            f"test bed {record.name} is not (yet) up; if its `up` was interrupted: "
            f"scripts/testbed down --name {record.name}"
        )
    if not Path("/run/netns", record.namespace).exists():
        raise ConfigError(
            f"test bed {record.name} has gone: was this machine restarted? Remove what is left: "
            f"scripts/testbed down --name {record.name}"
        )
    return Bed(record)


def _remove_unfinished(state: Path, name: str, say: Callable[[str], None]) -> None:
    if name not in records.bed_names(state):
        shutil.rmtree(state / "beds" / name, ignore_errors=True)  # killed before the record was written
    elif records.read_record(state, name).ready:
        raise ConfigError(f"there is already a test bed {name}; take it down first, or use another --name")
    else:
        say(f"removing what an interrupted `up` left of test bed {name}")
        down(state, name)
