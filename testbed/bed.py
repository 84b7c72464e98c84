"""An existing bed: run commands on its controller and its nodes, break and heal it, keep its disks, take it down."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from mpitrain.errors import ConfigError, LaunchError
from testbed import controller, host, network, processes, snapshots
from testbed.bed_record import BedRecord, locked, read_record
from testbed.container import Container
from testbed.node import Node, not_up, panic
from testbed.processes import wait_until
from testbed.uml import UserModeLinux

MOST_DELAY_MICROSECONDS = 1_000_000
_ENVIRONMENT = "/etc/environment"

# arp(7): a neighbour is queried every second. If the last query had no answer, connections fail with "no route to
# host".
_NEIGHBOUR_SECONDS = 1.5
_LOCK_SECONDS = 60.0
_REMOVED = ".removed-"  # a folder with this prefix is not a bed any more


class Bed:
    """Several machines on this one. `up` makes a bed, `find` finds one. A context manager takes it down at its end."""

    def __init__(self, record: BedRecord) -> None:
        """Make the object for the bed of a record."""
        self.record = record
        self._nodes: dict[str, Node] = {name: make_node(record, name) for name in record.names}

    @property
    def name(self) -> str:
        """The bed's name."""
        return self.record.name

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes: node1 (the head), node2, ..."""
        return self.record.names

    @property
    def inventory(self) -> Path:
        """The inventory: groups head and workers, with how to log in."""
        return self.record.inventory

    def address(self, node: str) -> str:
        """The node's address."""
        return self.record.address(node)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_seconds: float = 120.0,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller: this machine's programs and files, the bed's network.

        The nodes' names resolve, ssh knows their host keys and logs in as admin, ANSIBLE_INVENTORY is the bed's.

        Raises:
            LaunchError: the command took longer than `timeout_seconds`. It is killed, with all it started.
        """
        return controller.run(
            self.record, command, timeout_seconds=timeout_seconds, env=env or {}, input=input, cwd=cwd
        )

    def ssh(
        self, node: str, command: str, *, user: str = "admin", timeout_seconds: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a line of shell on a node, by ssh from the controller, host keys checked, never asking."""
        login = f"{user}@{self.record.checked(node)}"
        return self.run(["ssh", "-o", "BatchMode=yes", login, command], timeout_seconds=timeout_seconds)

    def node_run(
        self, node: str, command: Sequence[str], *, timeout_seconds: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root on a node. On container nodes, this does not need the network."""
        if "freeze" in self.faults(node):
            raise LaunchError(f"{node} is frozen: scripts/testbed heal {node}")
        return self.node(node).run(command, timeout_seconds=timeout_seconds)

    def is_up(self, node: str) -> bool:
        """True if users can log in on a node, apart from its network."""
        return self.node(node).is_up()

    def link_bytes(self, node: str) -> int:
        """Return the bytes that crossed the node's cable since the bed was made, in both directions together."""
        return network.link_bytes(self.record, self.record.checked(node))

    def faults(self, node: str) -> dict[str, str]:
        """Return the faults of a node, with their values."""
        return self.record.faults_of(node)

    def kill(self, node: str) -> None:
        """Cut the node's power. The cable is cut first, so that no end of a connection gets out."""
        network.set_link(self.record, self.record.checked(node), up=False)
        processes.kill(processes.group(self.name, node))
        self.record.note_fault(node, "kill")

    def start(self, node: str) -> None:
        """Switch a node on again, with its unchanged disk, and wait until users can log in."""
        network.set_link(self.record, node, up="cut" not in self.faults(node))
        if not self.node(node).boot_id():
            self.node(node).start()
        self.record.forget_fault(node, "kill")
        self.wait([node])
        self.restore_network(node)

    def reboot(self, node: str) -> None:
        """Reboot a node in an orderly way, and wait until users can log in."""
        before = self.node(node).boot_id()
        self.node(node).run(["systemctl", "reboot"], timeout_seconds=120)
        limit = self.node(node).boot_seconds
        if not wait_until(lambda: self.node(node).boot_id() not in ("", before), timeout_seconds=limit):
            raise not_up(self.record, node, limit)
        self.wait([node])
        self.restore_network(node)

    def freeze(self, node: str) -> None:
        """Stop all of a node's processes. Its kernel still answers pings and accepts connections."""
        processes.freeze(processes.group(self.name, self.record.checked(node)), True)
        self.record.note_fault(node, "freeze")

    def thaw(self, node: str) -> None:
        """Let a frozen node continue."""
        processes.freeze(processes.group(self.name, self.record.checked(node)), False)
        self.record.forget_fault(node, "freeze")

    def cut(self, node: str) -> None:
        """Pull the node's cable out, at the bridge."""
        network.set_link(self.record, self.record.checked(node), up=False)
        self.record.note_fault(node, "cut")

    def drop(self, node: str, ports: str | int) -> None:
        """Drop packets to these ports of the node: 22, or "111,2049,50000-50300". A program that connects waits."""
        self._filter(node, "drop", str(ports))

    def reject(self, node: str, ports: str | int) -> None:
        """Reject packets to these ports of the node. A program that connects gets an error at once."""
        self._filter(node, "reject", str(ports))

    def undrop(self, node: str) -> None:
        """Let all packets through to the node again. This undoes `drop` and `reject`."""
        for kind in ("drop", "reject"):
            self.record.forget_fault(node, kind)
        self.node(node).set_filters({})

    def shape(self, node: str, rate: str) -> None:
        """Limit the node's cable, in each direction, to a rate such as 1gbit or 100mbit."""
        self.node(node).set_queue(network.checked_rate(rate), self._delay(node))
        self.record.note_fault(node, "shape", rate)

    def delay(self, node: str, delay_microseconds: int) -> None:
        """Delay the node's cable, in each direction. Only for full beds; other beds have their delay from `up`."""
        if not 0 <= delay_microseconds <= MOST_DELAY_MICROSECONDS:
            raise ConfigError(f"a delay of {delay_microseconds} us; it must be 0 to {MOST_DELAY_MICROSECONDS}")
        self.node(node).set_queue(self.faults(node).get("shape"), delay_microseconds)
        self.record.note_fault(node, "delay", str(delay_microseconds))

    def mtu(self, node: str, mtu_bytes: int) -> None:
        """Set the MTU of the node's interface; the network's stays 1500 bytes."""
        if not 576 <= mtu_bytes <= 9000:
            raise ConfigError(f"an MTU of {mtu_bytes} bytes; it must be 576 to 9000")
        self.node(node).set_mtu(mtu_bytes)
        self.record.note_fault(node, "mtu", str(mtu_bytes))

    def clock(self, node: str, seconds: float) -> None:
        """Put the clock ahead (below 0: back) for all later logins on the node."""
        library = "/opt/mpitrain-testbed/lib/libfaketime.so.1"
        self._set_login_environment(node, [f"LD_PRELOAD={library}", f"FAKETIME={seconds:+g}s"])
        self.record.note_fault(node, "clock", f"{seconds:+g}")

    def heal(self, node: str) -> None:
        """Undo all faults of a node."""
        faults = self.faults(node)
        if "freeze" in faults:
            self.thaw(node)
        if "drop" in faults or "reject" in faults:
            self.undrop(node)
        if "cut" in faults:
            self.record.forget_fault(node, "cut")
            network.set_link(self.record, node, up="kill" not in faults)
            # Nodes that asked for its address while the cable was out have given up by then, and ask again.
            time.sleep(_NEIGHBOUR_SECONDS)
        if "kill" in faults:
            self.start(node)
        if "mtu" in faults:
            self.node(node).set_mtu(network.MTU_BYTES)
            self.record.forget_fault(node, "mtu")
        if "shape" in faults or "delay" in faults:
            self.record.forget_fault(node, "shape")
            self.record.forget_fault(node, "delay")
            self.node(node).set_queue(None, self._delay(node))
        if "clock" in faults:
            self._set_login_environment(node, [])
            self.record.forget_fault(node, "clock")

    def wait(self, nodes: Sequence[str]) -> None:
        """Wait until users can log in on all of these nodes.

        Raises:
            LaunchError: a node is not up in time, or its kernel has panicked. The error has the end of its console.
        """
        started = time.monotonic()
        for node in nodes:
            limit = self.node(node).boot_seconds
            left = max(0.0, limit + started - time.monotonic())
            wait_until(partial(self._has_booted, node), timeout_seconds=left)
            if not self.node(node).is_up():
                raise not_up(self.record, node, limit)

    def _has_booted(self, node: str) -> bool:
        """True if the node has booted, or never will."""
        return self.node(node).is_up() or bool(panic(self.record, node))

    def host_keys(self) -> dict[str, str]:
        """Return each node's public ssh host key, read from the node itself."""
        return {name: node.host_key() for name, node in self._nodes.items()}

    def save(self, name: str) -> None:
        """Keep the present state of all disks under a name. `up(snapshot=name)` starts from them.

        Raises:
            ConfigError: the name is not valid or is taken, a node is not up, or something is broken.
        """
        for node in self.names:
            if self.faults(node) or not self.is_up(node):
                raise ConfigError(f"{node} is broken or not up, so its disk is not saved: scripts/testbed heal {node}")
        snapshots.save(self.record, self._nodes, name)

    def down(self) -> None:
        """Take the bed down. Only saved snapshots and the image stay."""
        down(self.record.state, self.name)

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def node(self, node: str) -> Node:
        """The machine itself."""
        return self._nodes[self.record.checked(node)]

    def _delay(self, node: str) -> int:
        return int(self.faults(node).get("delay", self.record.delay_microseconds))

    def restore_network(self, node: str) -> None:
        """Set what a node's own kernel forgets at a boot: rate, delay and MTU. A container's cable keeps them."""
        if not self.record.full:
            return
        faults = self.faults(node)
        if self._delay(node) or "shape" in faults:
            self.node(node).set_queue(faults.get("shape"), self._delay(node))
        if "mtu" in faults:
            self.node(node).set_mtu(int(faults["mtu"]))

    def _filter(self, node: str, kind: str, ports: str) -> None:
        filters = self.faults(node) | {kind: network.checked_ports(ports)}
        self.node(node).set_filters({key: filters[key] for key in ("drop", "reject") if key in filters})
        self.record.note_fault(node, kind, ports)

    def _set_login_environment(self, node: str, lines: Sequence[str]) -> None:
        """Set variables for logins. pam_env(8) reads the file at each login; SetEnv of sshd would replace another
        one."""
        script = f"touch {_ENVIRONMENT} && sed -i '/^LD_PRELOAD=.*libfaketime/d; /^FAKETIME=/d' {_ENVIRONMENT}"
        if lines:
            script += f" && printf '%s\\n' {shlex.join(lines)} >>{_ENVIRONMENT}"
        done = self.node_run(node, ["sh", "-c", script])
        if done.returncode != 0:
            raise LaunchError(f"{node}: {script}: {done.stderr}")


def make_node(record: BedRecord, name: str) -> Node:
    """Return the node of a bed by its name."""
    return UserModeLinux(record, name) if record.full else Container(record, name)


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
    # After `scripts/testbed run bash`, `down` may be typed in that shell. Do not end this process.
    if os.getpid() in processes.members(processes.group(record.name)):
        processes.leave()
    processes.kill(processes.group(record.name))
    network.remove(record)
    processes.remove(processes.group(record.name))
    # Rename in one step, so that no folder without a record stays if this process is killed here.
    record.folder.rename(record.folder.with_name(f"{_REMOVED}{record.name}-{os.getpid()}"))
    for folder in record.folder.parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(folder, ignore_errors=True)
