"""The interface of a bed's nodes, and the common part of both kinds."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mpitrain.errors import LaunchError
from testbed.bed_record import BedRecord
from testbed.network import REPOSITORY_PORT
from testbed.processes import last_lines

# User-mode Linux prints this on its console if the CPU has more registers than it can save for a process.
_FEW_REGISTERS = "ptrace set fp regs failed"


class Node(Protocol):
    """One machine of a bed."""

    boot_seconds: float  # the most time that a boot may take

    def create(self) -> None:
        """Make the node's disk and cable."""

    def start(self) -> None:
        """Switch the node on."""

    def is_up(self) -> bool:
        """True if users can log in."""

    def boot_id(self) -> str:
        """Return an id that differs after each boot; empty while the node is off."""

    def host_key(self) -> str:
        """Return the node's public ssh host key, read from the node itself, not over the network."""

    def run(self, command: Sequence[str], *, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command as root on the node."""

    def flush(self) -> None:
        """Let the node write its memory buffers to its disk."""

    def save(self, folder: Path) -> None:
        """Copy the node's disk into an empty folder. The node is frozen meanwhile."""

    def set_queue(self, rate: str | None, delay_microseconds: int) -> None:
        """Limit and delay the node's cable, in each direction."""

    def set_mtu(self, mtu_bytes: int) -> None:
        """Set the MTU of the node's interface."""

    def set_filters(self, filters: dict[str, str]) -> None:
        """Drop or reject packets to some ports, and accept all others: {"drop": "22", "reject": "2049"}."""


def first_files(record: BedRecord, node: str) -> dict[str, str]:
    """Return the files that Debian's installer, or the cloud, writes for each machine: its name, and package
    sources."""
    repository = f"http://{record.controller}:{REPOSITORY_PORT}"
    return {
        "etc/hostname": f"{node}\n",
        "etc/hosts": (
            f"127.0.0.1\tlocalhost\n127.0.1.1\t{node}\n\n"
            "# The following lines are desirable for IPv6 capable hosts\n"
            "::1     localhost ip6-localhost ip6-loopback\nff02::1 ip6-allnodes\nff02::2 ip6-allrouters\n"
        ),
        "etc/apt/sources.list": f"deb [trusted=yes] {repository}/ ./\n",
        # All nodes share this machine's cores. A node that takes all of them would slow every job down.
        "etc/environment": "OMP_NUM_THREADS=1\n",
        "etc/pip.conf": (
            f"[global]\nno-index = true\nfind-links = {repository}/wheels/\ntrusted-host = {record.controller}\n"
        ),
    }


def console_log(record: BedRecord, node: str) -> Path:
    """Return the path of the file with the node's console output."""
    return record.node_folder(node) / "console.log"


def panic(record: BedRecord, node: str) -> str:
    """Return the line of the console with which the node's kernel panicked; empty if it has not."""
    return next((line for line in _console(record, node).splitlines() if line.startswith("Kernel panic")), "")


def not_up(record: BedRecord, node: str, timeout_seconds: float) -> LaunchError:
    """Return the error for a node on which users cannot log in in time, or whose kernel panicked."""
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
