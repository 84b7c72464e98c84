"""Messages to and from the saboteurs on all hosts of a job, and the process that breaks cables and power of a bed."""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping
from typing import Any

from mpitrain.chaos.sites import Site
from mpitrain.errors import LaunchError
from mpitrain.launch.connections import Connection

# Stands in place of a host's name for the process that breaks cables and power.
OUTAGES = ""
_AGAIN_SECONDS = 3.0
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
