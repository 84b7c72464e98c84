"""What a bed asks of its nodes, and what is the same for both kinds."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mpitrain.errors import LaunchError
from mpitrain.testbed.bed_record import BedRecord
from mpitrain.testbed.commands import last_lines
from mpitrain.testbed.network import REPOSITORY_PORT

# On the console of User-mode Linux where the CPU has more registers than it keeps for a process.
_FEW_REGISTERS = "ptrace set fp regs failed"


class Node(Protocol):
    """One machine of a bed."""

    boot_seconds: float  # how long a boot may take

    def create(self) -> None:
        """Make its disk and its cable."""

    def start(self) -> None:
        """Switch it on."""

    def is_up(self) -> bool:
        """Whether users can log in."""

    def boot_id(self) -> str:
        """Another one after each boot; empty while it is off."""

    def host_key(self) -> str:
        """Its public ssh host key, learnt from itself and not over the network."""

    def run(self, command: Sequence[str], *, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command as root in it."""

    def flush(self) -> None:
        """Have it write to its disk what it still has in memory."""

    def save(self, folder: Path) -> None:
        """Copy its disk into an empty folder; it is frozen meanwhile."""

    def set_queue(self, rate: str | None, delay_microseconds: int) -> None:
        """Limit and delay its cable, each way."""

    def set_mtu(self, mtu_bytes: int) -> None:
        """Set the MTU of its interface."""

    def set_filters(self, filters: dict[str, str]) -> None:
        """Drop or reject what comes to it for some ports, and let in all else: {"drop": "22", "reject": "2049"}."""


def first_files(record: BedRecord, node: str) -> dict[str, str]:
    """What Debian's installer, or the cloud, writes for each machine: its name, and where packages come from."""
    repository = f"http://{record.controller}:{REPOSITORY_PORT}"
    return {
        "etc/hostname": f"{node}\n",
        "etc/hosts": (
            f"127.0.0.1\tlocalhost\n127.0.1.1\t{node}\n\n"
            "# The following lines are desirable for IPv6 capable hosts\n"
            "::1     localhost ip6-localhost ip6-loopback\nff02::1 ip6-allnodes\nff02::2 ip6-allrouters\n"
        ),
        "etc/apt/sources.list": f"deb [trusted=yes] {repository}/ ./\n",
        # All nodes share this machine's cores; a node that takes all of them for itself makes every job crawl.
        "etc/environment": "OMP_NUM_THREADS=1\n",
        "etc/pip.conf": (
            f"[global]\nno-index = true\nfind-links = {repository}/wheels/\ntrusted-host = {record.controller}\n"
        ),
    }


def console_log(record: BedRecord, node: str) -> Path:
    """What the node printed on its console."""
    return record.node_folder(node) / "console.log"


def panic(record: BedRecord, node: str) -> str:
    """The line of its console with which its kernel ended itself; empty while it has not."""
    return next((line for line in _console(record, node).splitlines() if line.startswith("Kernel panic")), "")


def not_up(record: BedRecord, node: str, timeout_seconds: float) -> LaunchError:
    """The error for a node on which nobody can log in in time, or whose kernel ended itself."""
    log, line = console_log(record, node), panic(record, node)
    message = f"{node} of test bed {record.name} was not up within {timeout_seconds:g} s."
    if line:
        message = f"the kernel of {node} of test bed {record.name} ended itself: {line.rstrip('.')}."
    if _FEW_REGISTERS in _console(record, node):
        message += (
            " Debian's User-mode Linux has no room for all registers of this CPU (AMX, such as on Intel's Xeons since "
            "2023); use a fast bed, without --full, or a machine with another CPU."
        )
    return LaunchError(
        f"{message} The end of its console, {log}:\n{last_lines(_console(record, node)) or '    (empty)'}"
    )


def _console(record: BedRecord, node: str) -> str:
    try:
        return console_log(record, node).read_text(errors="replace")
    except FileNotFoundError:
        return ""
