"""The hosts of a job, and the saboteurs on them: how they are reached, and the messages to and from them.

Real hosts are reached by ssh, nodes of a test bed through their namespaces. So on a bed a cut cable does not cut off
chaos, and the job may belong to any user of the nodes. One more process breaks cables and power of a bed.
"""

from __future__ import annotations

import functools
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mpitrain.context import JobContext
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launch.batch import step_on
from mpitrain.launch.connections import BOOT, PYTHON, Connection, boot, boot_on, sources
from mpitrain.launch.hosts import place_ranks
from mpitrain.launch.jobs import ROSTER, find_jobs
from mpitrain.launch.processes import Marked
from mpitrain.watching.proc import read
from testbed import find
from testbed.container import Container

# The root of the checkout.
_ROOT = Path(__file__).parents[2]


@functools.cache
def saboteur() -> list[tuple[str, str]]:
    """Return name and text of what is sent to a host: the modules that a saboteur imports, and the saboteur.

    All are as at the first call: chaos may outlive an update of the checkout.
    """
    return [*sources(ROSTER), ("testbed.chaos.saboteur", Path(__file__).with_name("saboteur.py").read_text())]


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
        is_own = host == self._placement.own
        command = boot_on(host, is_own)
        # At SIGTERM srun kills what it has started, and the saboteur could not undo its fault. It ends with its stdin.
        may_end = not is_own and not step_on(host)
        return boot(host, command, saboteur(), wish, time.monotonic(), ends_with_us=may_end)

    def outages(self) -> Connection:
        """No outages are possible here; command.py refuses them."""
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
                raise ConfigError(f"{node} of test bed {name} is broken already ({broken}): scripts/testbed heal all")
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
        command = node.entered([*way, PYTHON, *BOOT], f"chaos-{os.getpid()}")
        return boot(host, command, saboteur(), wish, time.monotonic(), ends_with_us=True)

    def outages(self) -> Connection:
        """See Site."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the connection
        process = subprocess.Popen(
            [sys.executable, "-m", "testbed.chaos.bed_outages", self._bed.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C in the terminal reaches chaos only
            cwd=_ROOT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        return Connection(f"test bed {self._bed.name}", process, errors, time.monotonic())


def _no_job(token: str, known: str, hosts: tuple[str, ...]) -> ConfigError:
    where = ", ".join(hosts)
    return ConfigError(f"there is no job {token} of yours on {where}; running: {known}. `mpitrain ps` lists them")


# Stands in place of a host's name for the process that breaks cables and power.
OUTAGES = ""
_AGAIN_SECONDS = 3.0
_BEAT_SECONDS = 1.0
_CLOSE_SECONDS = 3.0
# A saboteur sends something every 5 s; on a busy machine its start takes longer.
_SILENT_SECONDS = 45.0
# After such a gap in its own time this process was suspended, not the hosts.
_SUSPENDED_SECONDS = 10.0


class Crew:
    """Use this in `with`: at its end all saboteurs undo what they have made, and end."""

    def __init__(self, site: Site, launcher: str, folder: str, *, breaks_nodes: bool) -> None:
        """Start a saboteur on each host; `folder` is the one to fill, `breaks_nodes`: cables and power are wanted."""
        self._site, self._wish = site, {"launcher": launcher, "folder": folder}
        self._connections: dict[str, Connection] = {}
        self._ran, self._suspended_seconds = time.monotonic(), 0.0
        self._beaten = 0.0
        self._news: list[str] = []
        # All by the clock of `now`.
        self._tried: dict[str, float] = {}
        self._heard = dict.fromkeys(site.hosts, self.now())
        self._seen: dict[str, float] = {}  # the first report of the present connection
        self._why: dict[str, str] = {}  # by host: why the last connection has ended, until the host is heard again
        self._missed: set[str] = set()  # the hosts that were reported as not heard
        self._early: list[tuple[str, dict[str, Any]]] = []  # to be returned by the next `exchange`
        for host in site.hosts:
            self._connect(host)
        if breaks_nodes:
            self._connections[OUTAGES] = site.outages()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.hang_up()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for connection in self._connections.values():
            connection.close(max(0.0, deadline - time.monotonic()))

    def now(self) -> float:
        """Return the time in seconds, by a clock that stands still while this process is suspended."""
        now = time.monotonic()
        gap, self._ran = now - self._ran, now
        if gap > _SUSPENDED_SECONDS:
            self._suspended_seconds += gap
            self._news.append(f"chaos itself was suspended for {gap:.0f} s, and saw nothing of the job meanwhile")
        return now - self._suspended_seconds

    def greetings(self) -> dict[str, dict[str, Any]]:
        """Return what each saboteur says of its host.

        Raises:
            LaunchError: names every host that does not answer.
        """
        greetings: dict[str, dict[str, Any]] = {}
        early: list[tuple[str, dict[str, Any]]] = []
        deadline = self.now() + _SILENT_SECONDS
        while len(greetings) < len(self._site.hosts) and self.now() < deadline:
            for host, message in self.exchange(0.1):
                if "greeting" in message:
                    greetings[host] = message["greeting"]
                else:
                    early.append((host, message))
            wrong = [connection.why_closed() for connection in self._connections.values() if connection.is_closed]
            if wrong:
                raise LaunchError("; ".join(wrong))
        if silent := [host for host in self._site.hosts if host not in greetings]:
            raise LaunchError(f"no answer within {_SILENT_SECONDS:g} s from {', '.join(silent)}")
        self._early = early
        return greetings

    def send(self, host: str, message: Mapping[str, Any]) -> bool:
        """Send to a saboteur; return whether there is a connection to it."""
        connection = self._connections.get(host)
        if connection is None or connection.is_closed:
            return False
        connection.send(message)
        return True

    def send_all(self, message: Mapping[str, Any]) -> None:
        """Send to the saboteur of every host to which there is a connection."""
        for host in self._site.hosts:
            self.send(host, message)

    def exchange(self, timeout_seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Return what arrives within that time: host and message. {"closed": 1}: a connection has closed."""
        messages, self._early = self._early, []
        if time.monotonic() - self._beaten >= _BEAT_SECONDS:
            self._beaten = time.monotonic()
            self.send_all({"beat": 1})
        with selectors.DefaultSelector() as ways:
            for host, connection in self._connections.items():
                connection.flush()
                if not connection.is_closed:
                    assert connection.process.stdout is not None
                    ways.register(connection.process.stdout, selectors.EVENT_READ, host)
            if not ways.get_map():
                time.sleep(timeout_seconds)
            for key, _ in ways.select(timeout_seconds):
                connection = self._connections[key.data]
                came = connection.receive(time.monotonic())
                messages += [(key.data, message) for message in came]
                if any("ranks" in message for message in came):  # a greeting alone shows nothing of the job
                    self._heard[key.data] = self.now()
                    self._seen.setdefault(key.data, self._heard[key.data])
                    self._why.pop(key.data, None)
                if connection.is_closed:
                    messages.append((key.data, {"closed": 1}))
        return messages

    def reconnect(self) -> None:
        """Start a saboteur again on the hosts that have lost theirs, now and then: such a host may come back."""
        now = self.now()
        for host in self._site.hosts:
            connection, waited = self._connections.get(host), now - self._tried[host]
            if connection is not None and not connection.is_closed:
                # The process of the connection may be stopped, or its network may have gone without a word.
                if min(waited, now - self._heard[host]) < _SILENT_SECONDS:
                    continue
                self._why[host] = f"the saboteur there sent nothing for {_SILENT_SECONDS:g} s"
                self._early.append((host, {"closed": 1}))
            elif waited < _AGAIN_SECONDS:
                continue
            elif connection is not None:
                self._why[host] = connection.why_closed()
            if connection is not None:
                connection.hang_up()
                connection.close(0.0)
            self._connect(host)

    def seen_after(self, moment: float) -> set[str]:
        """Return the hosts whose present connection has shown nothing of the job up to that moment, by `now`."""
        return {host for host in self._site.hosts if self._seen.get(host, float("inf")) > moment}

    def news(self) -> list[str]:
        """Return a line for each host that has not been heard for long, and for each that is heard again."""
        now = self.now()
        lines, self._news = self._news, []
        for host, heard in self._heard.items():
            silent = now - heard > _SILENT_SECONDS
            if silent and host not in self._missed:
                self._missed.add(host)
                why = self._why.get(host, "no reason is known")
                lines.append(f"{host}: not heard for {_SILENT_SECONDS:g} s; chaos connects anew: {why}")
            elif not silent and host in self._missed:
                self._missed.remove(host)
                lines.append(f"{host}: heard again")
        return lines

    def _connect(self, host: str) -> None:
        self._tried[host] = self.now()
        self._seen.pop(host, None)
        try:
            self._connections[host] = self._site.connect(host, self._wish)
        except LaunchError as error:  # a node of a bed without power
            self._why[host] = str(error)
            self._connections.pop(host, None)
