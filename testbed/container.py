"""Nodes that are booting containers on this machine's kernel: systemd is process 1, with its own sshd, users, /etc,
journal and network. The disk is an overlay: the node's folder holds what the node writes, the rest is the image."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpitrain.errors import ConfigError, LaunchError
from testbed import network, processes
from testbed.bed_record import BedRecord
from testbed.node import console_log, first_files
from testbed.processes import execute, start_in_background
from testbed.snapshots import snapshot_layers

# Runs in its own mount namespace, so that no other process sees the overlay, and it goes with the node.
# systemd-nspawn's exit code 133 means that the node reboots itself.
_KEEPER = """\
echo $$ >"$1/cgroup.procs" || exit 1
tries=0
until mount -t overlay overlay -o "$2" "$3"; do  # the mount of a killed node takes a moment to vanish
    tries=$((tries + 1))
    [ "$tries" -lt 50 ] || exit 1
    sleep 0.1
done
shift 3
until "$@"; [ $? -ne 133 ]; do :; done
"""
# Added to nspawn's own: firewalls, locked memory. The clock and modules are left out: they belong to the machine.
_CAPABILITIES = "CAP_NET_ADMIN,CAP_IPC_LOCK"
# System calls that nspawn forbids: file handles (an NFS server in user space needs them), keyrings, tracing.
_SYSTEM_CALLS = "open_by_handle_at name_to_handle_at @keyring perf_event_open bpf"
# NFS in user space, systemd's automounts, and tunnels in user space need these.
_DEVICES = ("/dev/fuse", "/dev/autofs", "/dev/net/tun")
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}


class Container:
    """A node that is a container."""

    boot_seconds = 120.0

    def __init__(self, record: BedRecord, name: str) -> None:
        """Make the object for the node of that name, which may be off."""
        self.record = record
        self.name = name
        self.group = processes.group(record.name, name)
        self.folder = record.node_folder(name)

    def create(self) -> None:
        """Make the node's disk and cable."""
        for part in ("upper", "work", "root"):
            (self.folder / part).mkdir(parents=True)
        (self.folder / "upper").chmod(0o755)
        if self.record.snapshot is None:
            for path, text in first_files(self.record, self.name).items():
                file = self.folder / "upper" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        network.make_cable(self.record, self.name)

    def start(self) -> None:
        """Switch the node on."""
        image = self.record.image_folder
        layers = [*snapshot_layers(self.record, self.name), image / "nfs", image / "root"]
        overlay = f"lowerdir={':'.join(map(str, layers))},upperdir={self.folder}/upper,workdir={self.folder}/work"
        root = str(self.folder / "root")
        self.group.mkdir(parents=True, exist_ok=True)
        console_log(self.record, self.name).unlink(missing_ok=True)
        start_in_background(
            ["unshare", "--mount", "sh", "-c", _KEEPER, "keeper", str(self.group)]
            # nfs_export: gives files handles, which the NFS server needs.
            + [f"{overlay},index=on,nfs_export=on", root]
            + ["env", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1", "SYSTEMD_NSPAWN_API_VFS_WRITABLE=network"]
            + ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot", "--directory", root]
            + [f"--machine={self.name}", f"--hostname={self.name}"]
            + [f"--network-namespace-path=/run/netns/{self.record.node_namespace(self.name)}"]
            + ["--resolv-conf=off", "--timezone=off", "--link-journal=no"]
            + [f"--bind={device}" for device in _DEVICES if Path(device).exists()]
            + [f"--capability={_CAPABILITIES}", f"--system-call-filter={_SYSTEM_CALLS}"]
            + ["systemd.show_status=auto"],
            console_log(self.record, self.name),
        )

    def is_up(self) -> bool:
        """True if sshd listens and ordinary users may log in: pam_nologin(8) turns them away until the boot is done."""
        pid = self.pid()
        if pid is None or not self._ssh_listens(pid):
            return False
        return not Path(f"/proc/{pid}/root/run/nologin").exists()

    def boot_id(self) -> str:
        """Return an id that differs after each boot; empty while the node is off."""
        pid = self.pid()
        with suppress(OSError):  # the node is ending just now
            return "" if pid is None else f"{pid} {_start_time(pid)}"
        return ""

    def host_key(self) -> str:
        """Return the node's public ssh host key, read from its disk."""
        return Path(f"/proc/{self._running()}/root/etc/ssh/ssh_host_ed25519_key.pub").read_text()

    def run(self, command: Sequence[str], *, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command as root in the node's namespaces. This does not need the network."""
        visitor = f"{os.getpid()}-{os.urandom(4).hex()}"
        group = self._visitors(visitor)
        try:
            return subprocess.run(
                self.entered(command, visitor),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            processes.kill(group)  # so far only nsenter was killed
            raise LaunchError(f"{self.name}: did not end within {timeout_seconds:g} s: {command}") from None
        finally:
            with suppress(OSError):  # processes that the command left in the background continue
                group.rmdir()

    def entered(self, command: Sequence[str], visitor: str) -> list[str]:
        """Return the command line that runs a command as root on the node, in a control group of that name, which
        stays."""
        enter = ["nsenter", "--target", str(self._running()), "--all", "env", "-i"]
        words = [*enter, *(f"{name}={value}" for name, value in _ENVIRONMENT.items()), *command]
        return processes.in_group(self._visitors(visitor), words)

    def _visitors(self, visitor: str) -> Path:
        return self.group / "visitors" / visitor

    def flush(self) -> None:
        """Do nothing: the node's files are this machine's."""

    def save(self, folder: Path) -> None:
        """Copy what was written since the node was made."""
        execute(["cp", "--archive", "--reflink=auto", f"{self.folder}/upper/.", folder], timeout_seconds=300)

    def set_queue(self, rate: str | None, delay_microseconds: int) -> None:
        """Limit the node's cable, in each direction. A delay is not possible here: the cable has it from its making."""
        if delay_microseconds != self.record.delay_microseconds:
            raise ConfigError(
                "a container's cable gets its delay at the start: scripts/testbed up N --delay-microseconds US "
                "(full beds can change it later)"
            )
        network.shape(self.record, self.name, rate, both_ends=True)

    def set_mtu(self, mtu_bytes: int) -> None:
        """Set the MTU of the node's interface."""
        network.set_mtu(self.record, self.name, mtu_bytes)

    def set_filters(self, filters: dict[str, str]) -> None:
        """Drop or reject packets to some ports, in the node's network namespace."""
        network.set_node_filters(self.record, self.name, filters)

    def pid(self) -> int | None:
        """Return the id of the node's process 1 outside of the node; None while the node is off."""
        for pid in processes.members(self.group):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            numbers = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
            if len(numbers) > 1 and numbers[-1] == "1" and "\nState:\tZ" not in status:
                return pid
        return None

    def _running(self) -> int:
        pid = self.pid()
        if pid is None:
            raise LaunchError(f"{self.name} of test bed {self.record.name} is off: scripts/testbed heal {self.name}")
        return pid

    def _ssh_listens(self, pid: int) -> bool:
        try:
            lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        except OSError:
            return False
        fields = [line.split() for line in lines]
        return any(field[1].endswith(":0016") and field[3] == "0A" for field in fields)


def _start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
