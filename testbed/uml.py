"""Nodes that are machines with their own kernels: Debian under User-mode Linux, which runs as a program of this
machine. They have real NFS 4.2 (server and client), netem, and one core each. The disk is a plain copy of the image."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mpitrain.errors import ConfigError, LaunchError
from testbed import controller, network, processes
from testbed.bed_record import BedRecord
from testbed.image import HERE, copy_tree, full_disk, write_to_disk
from testbed.node import console_log, first_files
from testbed.processes import execute, start_in_background

_MEMORY = "768M"
_COPY_SECONDS = 120.0


class UserModeLinux:
    """A node with its own kernel."""

    boot_seconds = 180.0

    def __init__(self, record: BedRecord, name: str) -> None:
        """Make the object for the node of that name, which may be off."""
        self.record = record
        self.name = name
        self.group = processes.group(record.name, name)
        self.disk = record.node_folder(name) / "disk.img"

    def create(self) -> None:
        """Make the node's disk and cable."""
        self.disk.parent.mkdir()
        # Do not use ubd's copy-on-write disks: they were damaged when a killed node's disk was used again.
        if self.record.snapshot is None:
            _copy(full_disk(self.record.image_folder), self.disk)
            write_to_disk(self.disk, first_files(self.record, self.name))
        else:
            _copy(self.record.state / "snapshots" / self.record.snapshot / self.name / "disk.img", self.disk)
        copy_tree(HERE / "files/keeper", self.disk.parent / "bin")
        network.make_tap(self.record, self.name)

    def start(self) -> None:
        """Switch the node on."""
        log = console_log(self.record, self.name)
        log.unlink(missing_ok=True)
        kernel = ["linux.uml", f"umid={self.name}", f"uml_dir={self.disk.parent}", f"mem={_MEMORY}"]
        kernel += [f"ubd0={self.disk}", "root=/dev/ubda", "rw", "con=null", "con0=null,fd:1", "ssl=null"]
        kernel += [f"vec0:transport=tap,ifname={self.name},depth=128,gro=1,mac={self._mac()}"]
        kernel += ["quiet", "loglevel=4", "systemd.show_status=auto"]
        kernel += ["systemd.mask=systemd-udev-trigger.service"]  # there are no devices to find, and it takes seconds
        kernel += [f"testbed.address={self.record.address(self.name)}/24"]
        # The node's memory is a file in TMPDIR.
        env = ["env", "TMPDIR=/dev/shm", f"PATH={self.disk.parent / 'bin'}:{os.defpath}"]
        command = ["ip", "netns", "exec", self.record.namespace, *env, *kernel]
        start_in_background(processes.in_group(self.group, command), log)

    def is_up(self) -> bool:
        """True if the node has said on its console that users can log in."""
        boot = self.boot_id()
        return bool(boot) and self._told("up")[:1] == [boot]

    def boot_id(self) -> str:
        """Return an id that differs after each boot; empty while the node is off or has not printed it yet."""
        return (self._told("boot") or [""])[0] if processes.is_populated(self.group) else ""

    def host_key(self) -> str:
        """Return the node's public ssh host key, from its console."""
        words = self._told("boot")
        if len(words) < 3:
            raise LaunchError(f"{self.name}: no host key on its console, {console_log(self.record, self.name)}")
        return " ".join(words[1:3])

    def run(self, command: Sequence[str], *, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command as root on the node, with ssh as admin and sudo."""
        line = shlex.join(["sudo", "-n", *command])
        ssh = ["ssh", "-o", "BatchMode=yes", f"admin@{self.name}", line]
        return controller.run(self.record, ssh, timeout_seconds=timeout_seconds, env={})

    def flush(self) -> None:
        """Let the node write its memory buffers to its disk."""
        self._do("sync", timeout_seconds=60)

    def save(self, folder: Path) -> None:
        """Copy the node's disk into an empty folder. The node is frozen meanwhile."""
        _copy(self.disk, folder / "disk.img")

    def set_queue(self, rate: str | None, delay_microseconds: int) -> None:
        """Limit and delay the node's cable. The whole delay is on what the node sends, so it is that of both
        directions."""
        network.shape(self.record, self.name, rate, both_ends=False)
        script = "tc qdisc del dev eth0 root 2>/dev/null || true"
        place = "root"
        if delay_microseconds:
            script += f"; tc qdisc add dev eth0 root handle 1: netem delay {2 * delay_microseconds}us limit 100000"
            place = "parent 1:1"
        if rate is not None:
            script += f"; tc qdisc add dev eth0 {place} tbf rate {rate} {' '.join(network.SHAPER)}"
        self._do(script)

    def set_mtu(self, mtu_bytes: int) -> None:
        """Set the MTU of the node's interface."""
        if mtu_bytes > network.MTU_BYTES:
            raise ConfigError(
                f"User-mode Linux's network card allows an MTU of at most {network.MTU_BYTES} bytes, not {mtu_bytes}"
            )
        self._do(f"ip link set eth0 mtu {mtu_bytes}")

    def set_filters(self, filters: dict[str, str]) -> None:
        """Drop or reject packets to some ports, at the bridge."""
        try:
            network.set_bridge_filters(self.record, self.name, filters)
        except LaunchError as error:
            if "reject" in filters:
                raise LaunchError(
                    "a full bed rejects packets at its bridge, which this machine's kernel cannot do (it lacks "
                    f"nft_reject_bridge); use drop, or a bed without --full. {error}"
                ) from None
            raise

    def _mac(self) -> str:
        """Return a MAC address that stays the same, because others remember it. It is locally administered."""
        return "02:00:" + ":".join(f"{int(number):02x}" for number in self.record.address(self.name).split("."))

    def _do(self, script: str, *, timeout_seconds: float = 120.0) -> None:
        done = self.run(["sh", "-ec", script], timeout_seconds=timeout_seconds)
        if done.returncode != 0:
            raise LaunchError(f"{self.name}: {script}: {done.stderr}")

    def _told(self, word: str) -> list[str]:
        """Return the last words of testbed-tell after that word."""
        try:
            text = console_log(self.record, self.name).read_text(errors="replace")
        except FileNotFoundError:
            return []
        lines = [line.split() for line in text.splitlines() if line.startswith(f"mpitrain-testbed {word} ")]
        return lines[-1][2:] if lines else []


def _copy(source: Path, target: Path) -> None:
    execute(["cp", "--sparse=always", "--reflink=auto", source, target], timeout_seconds=_COPY_SECONDS)
