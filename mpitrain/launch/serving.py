"""Servers here, with workers on known hosts: on each host a connection starts its workers.

hosts are compared ─> servers ─> connections ─> workers ─> the first server ends ─> what is left is ended
"""

from __future__ import annotations

import select
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.job.context import JobContext
from mpitrain.launch import over_hosts
from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.served import variables
from mpitrain.launch.server_processes import how_ended, say, started
from mpitrain.launch.sizes import show_sizes
from mpitrain.launch.variables import is_of_login

_MODULES = ("launch.worker_host",)
_LOOK_SECONDS = 0.2
# How long workers have to end after a signal, and after the end of their server, which has told them before.
_END_SECONDS, _FAREWELL_SECONDS = 10.0, 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The servers and their known workers.

    Attributes:
        program: arguments of each server's Python: a script, or -m and a module; then the script's arguments.
        script: the file to run; hosts with another version of it, or other code beside it, are refused.
        ports: of the servers.
        placement: where the workers go; a rank of it is a worker. None: no workers are started here.
        address: where these workers find the first server, as HOST:PORT.
        work: the arguments of a worker's Python before the address: those that run `mpitrain work`.
    """

    program: Sequence[str]
    script: str
    ports: Sequence[int]
    placement: Placement | None
    address: str
    work: Sequence[str]

    @property
    def places(self) -> Sequence[Place]:
        """The hosts of the workers."""
        return self.placement.places if self.placement else ()

    def command(self) -> list[str]:
        """Return the command of each worker."""
        return [sys.executable, *self.work, self.address, *self.program]


def show(serving: Serving, line: str) -> None:
    """Print the commands of the servers and of their known workers, and the `line` for others, without the key.

    Raises:
        LaunchError: see show_sizes.
    """
    server = shlex.join([sys.executable, *serving.program])
    several = len(serving.ports) > 1
    for number, port in enumerate(serving.ports):
        print(f"{server}{f'  # server {number}, port {port}' if several else ''}")
    for place in serving.places:
        command = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(serving.command())}"
        for device in _devices(place):
            print(f"{place.host}: {command}{f'  # on {device}' if device else ''}")
    print(line, flush=True)
    show_sizes(serving.program, [f"server {number}, port {port}" for number, port in enumerate(serving.ports)])


def serve(serving: Serving, contexts: Sequence[JobContext], descriptor: int, key: Mapping[str, str]) -> int:
    """Start the servers and their known workers, see to their end, and return the exit code of the first server.

    Args:
        serving: what is started.
        contexts: what each server is told.
        descriptor: that the servers inherit.
        key: the variable with the key that the workers need.

    Raises:
        LaunchError: a host cannot be reached, or differs from this one. Nothing was started.
    """
    if serving.placement and not serving.placement.is_here:
        over_hosts.check(serving.placement, serving.script, {}, "nothing was started")
    with ExitStack() as stack:
        signals = stack.enter_context(_signals())
        servers = stack.enter_context(started([sys.executable, *serving.program], contexts, descriptor))
        workers = KnownWorkers(serving, contexts[0], key)
        stack.callback(workers.close)
        workers.connect()
        while (code := servers.look()) is None:
            workers.look(_LOOK_SECONDS)
            while signals:
                servers.signal(signals.pop(0))
        if code == 0:
            workers.wait(_FAREWELL_SECONDS)
        return servers.finish()


class KnownWorkers:
    """The connections to the hosts of a server's workers."""

    def __init__(self, serving: Serving, server: JobContext, key: Mapping[str, str]) -> None:
        """`server` is what the server was told: its workers are of the same job."""
        self._serving, self._key = serving, key
        self._worker = JobContext(job=server.job, launcher=server.launcher, serves="worker")
        self._open: list[Connection] = []

    def connect(self) -> None:
        """Start the workers on all hosts, over connections that come about meanwhile."""
        placement = self._serving.placement
        for place in self._serving.places:
            is_here = placement is not None and place.host == placement.own
            self._open.append(connect(place.host, is_here, self._wish(place), time.monotonic(), _MODULES))

    def look(self, seconds: float) -> None:
        """Print what has come within so many seconds."""
        outputs = {connection.output: connection for connection in self._open}
        for connection in self._open:
            connection.flush()
        ready, _, _ = select.select(outputs, [], [], seconds)
        for output in ready:
            connection = outputs[output]
            for message in connection.receive(time.monotonic()):
                _tell(connection.host, message)
            if connection.is_closed:
                if connection.process.wait():
                    say(f"{connection.why_closed()}; its workers have ended")
                connection.hang_up()
                connection.close(0.0)
                self._open.remove(connection)

    def wait(self, seconds: float) -> None:
        """Let all workers end, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            self.look(_LOOK_SECONDS)

    def close(self) -> None:
        """End what is left of the workers."""
        for connection in self._open:
            connection.hang_up()
        for connection in self._open:
            connection.close(_END_SECONDS)
        self._open.clear()

    def _wish(self, place: Place) -> dict[str, object]:
        common = {name: value for name, value in variables(JobContext()).items() if not is_of_login(name)}
        common |= self._key
        contexts = [replace(self._worker, devices=(device,) if device else ()) for device in _devices(place)]
        return {
            "folder": str(Path.cwd()),
            "command": self._serving.command(),
            "variables": [common | context.variables() for context in contexts],
        }


def _devices(place: Place) -> Sequence[str]:
    return place.devices or ("",) * place.num_ranks


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the numbers of signals that come, in place of ending by them."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _SIGNALS}
    try:
        yield came
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _tell(host: str, message: Mapping[str, list[object]]) -> None:
    if "line" in message:
        number, stream, text = message["line"]
        print(f"[{host}:{number}] {text}", file=sys.stderr if stream == 2 else sys.stdout, flush=True)
    elif message.get("ended", [0, 0])[1]:
        number, code = message["ended"]
        assert isinstance(code, int)
        say(f"worker {number} on {host} {how_ended(code)}; others go on")
