"""The removal of a bed, in whatever state a killed `up` has left it."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from mpitrain.testbed import cgroup, host, network
from mpitrain.testbed.bed_record import BedRecord, locked, read_record

_LOCK_SECONDS = 60.0
_REMOVED = ".removed-"  # a folder with this prefix is not a bed any more


def down(state: Path, name: str) -> None:
    """Take a bed down, also an incomplete one: processes, network, files.

    Raises:
        ConfigError: the user is not root, or there is no such bed.
        LaunchError: another command works on it, or something could not be removed.
    """
    host.require_root()
    record = read_record(state, name)
    with working_on(record):
        if record.folder.exists():  # otherwise another process has just taken the bed down
            remove_bed(record)


def working_on(record: BedRecord) -> AbstractContextManager[None]:
    """Keep others from taking the bed up or down at the same time."""
    return locked(record.folder / "lock", f"test bed {record.name}", timeout_seconds=_LOCK_SECONDS)


def remove_bed(record: BedRecord) -> None:
    """Remove everything of a bed. The caller holds the lock."""
    # After `mpitrain testbed run bash`, `down` may be typed in that shell. Do not end this process.
    if os.getpid() in cgroup.processes(cgroup.group(record.name)):
        cgroup.leave()
    cgroup.kill(cgroup.group(record.name))
    network.remove(record)
    cgroup.remove(cgroup.group(record.name))
    # Rename in one step, so that no folder without a record stays if this process is killed here.
    record.folder.rename(record.folder.with_name(f"{_REMOVED}{record.name}-{os.getpid()}"))
    for folder in record.folder.parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(folder, ignore_errors=True)
