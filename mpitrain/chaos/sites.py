"""The hosts of a job, and how chaos reaches them: real hosts by ssh, nodes of a test bed through their namespaces.

So on a bed a cut cable does not cut off chaos, and the job may belong to any user of the nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.job.context import JobContext
from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.hosts import place_ranks
from mpitrain.launch.jobs import ROSTER, find_jobs
from mpitrain.launch.marked import Marked, read
from mpitrain.testbed import find
from mpitrain.testbed.container import Container

# The modules of a saboteur, each after those that it imports.
SABOTEUR = (*ROSTER, "chaos.disk", "chaos.outage", "chaos.saboteur")


class Site(Protocol):
    """The hosts of a job."""

    hosts: tuple[str, ...]
    is_real: bool

    def launcher_of(self, token: str) -> str:
        """Return the name of the job's launcher (roster.launcher_name).

        Raises:
            ConfigError: there is no such job.
        """

    def connect(self, host: str, wish: Mapping[str, Any]) -> Connection:
        """Start a saboteur on a host; return at once.

        Raises:
            LaunchError: the host is off.
        """

    def outages(self) -> Connection:
        """Start what breaks cables and power; return at once."""


class RealHosts:
    """Real machines, which their users need; also this machine alone."""

    is_real = True

    def __init__(self, hosts: str | None, inventory: Path | None) -> None:
        """Take the options of `mpitrain ps`."""
        self._placement = place_ranks(hosts, inventory, None, 1)
        self.hosts = tuple(self._placement.machines)

    def launcher_of(self, token: str) -> str:
        """See Site."""
        jobs, wrong = find_jobs(self._placement)
        launchers = [job.launcher for job in jobs if job.token == token]
        if wrong:
            raise LaunchError("; ".join(wrong.values()))
        if not launchers:
            raise _no_job(token, ", ".join(job.token for job in jobs) or "none", self.hosts)
        return launchers[0]

    def connect(self, host: str, wish: Mapping[str, Any]) -> Connection:
        """See Site."""
        return connect(host, host == self._placement.own, wish, time.monotonic(), SABOTEUR)

    def outages(self) -> Connection:
        """No outages are possible here; cli.chaos refuses them."""
        raise AssertionError


class BedNodes:
    """The nodes of a fast test bed on this machine."""

    is_real = False

    def __init__(self, name: str) -> None:
        """The bed of that name.

        Raises:
            ConfigError: not root; there is no such bed; its nodes are virtual machines, or something is broken there.
        """
        self._bed = find(name)
        self.hosts = self._bed.names
        if self._bed.record.full:
            raise ConfigError(f"--bed {name}: its nodes are virtual machines; chaos needs a bed made without --full")
        for node in self.hosts:
            if faults := self._bed.faults(node):
                broken = ", ".join(faults)
                raise ConfigError(f"{node} of test bed {name} is broken already ({broken}): mpitrain testbed heal all")
        self._user = ["0", "0"]  # numbers of user and group

    def launcher_of(self, token: str) -> str:
        """See Site. The processes of containers are processes of this machine too."""
        for pid in Marked(token).find():
            words = read(f"/proc/{pid}/environ").decode(errors="replace").split("\0")
            context = JobContext.read(dict(word.partition("=")[::2] for word in words))
            if context.job == token:
                status = Path(f"/proc/{pid}").stat()
                self._user = [str(status.st_uid), str(status.st_gid)]
                return context.launcher
        raise _no_job(token, "see `mpitrain ps` on a node", self.hosts)

    def connect(self, host: str, wish: Mapping[str, Any]) -> Connection:
        """See Site."""
        node = self._bed.node(host)
        assert isinstance(node, Container)
        user, group = self._user
        way = ["setpriv", f"--reuid={user}", f"--regid={group}", "--init-groups"]
        return connect(host, False, wish, time.monotonic(), SABOTEUR, node.entered(way, f"chaos-{os.getpid()}"))

    def outages(self) -> Connection:
        """See Site."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the connection
        process = subprocess.Popen(
            [sys.executable, "-m", "mpitrain.chaos.bed_outages", self._bed.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C in the terminal reaches chaos only
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        return Connection(f"test bed {self._bed.name}", process, errors, time.monotonic())


def _no_job(token: str, known: str, hosts: tuple[str, ...]) -> ConfigError:
    where = ", ".join(hosts)
    return ConfigError(f"there is no job {token} of yours on {where}; running: {known}. `mpitrain ps` lists them")
