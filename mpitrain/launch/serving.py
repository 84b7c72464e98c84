"""A server with workers on known hosts: one process here, and on each host a connection that starts its workers.

hosts are compared ─> server ─> connections ─> workers ─> the server ends ─> what is left of the workers is ended
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.errors import LaunchError
from mpitrain.job.context import JobContext
from mpitrain.launch import over_hosts
from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.processes import end_with_parent
from mpitrain.launch.served import variables
from mpitrain.launch.variables import is_of_login

_MODULES = ("launch.worker_host",)
_LOOK_SECONDS = 0.2
# How long a server has to end after a signal, and workers after the end of their server, which has told them before.
_END_SECONDS, _FAREWELL_SECONDS = 10.0, 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server and its known workers.

    Attributes:
        program: arguments of the server's Python: a script, or -m and a module; then the script's arguments.
        script: the file to run; hosts with another version of it, or other code beside it, are refused.
        placement: where the workers go; a rank of it is a worker. None: no workers are started here.
        address: where these workers find the server, as HOST:PORT.
        work: the arguments of a worker's Python before the address: those that run `mpitrain work`.
    """

    program: Sequence[str]
    script: str
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
    """Print the commands of the server and of its known workers, and the `line` for others, without the key."""
    print(shlex.join([sys.executable, *serving.program]))
    for place in serving.places:
        command = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(serving.command())}"
        for device in _devices(place):
            print(f"{place.host}: {command}{f'  # on {device}' if device else ''}")
    print(line)


def serve(serving: Serving, context: JobContext, descriptor: int, key: Mapping[str, str]) -> int:
    """Start the server and its known workers, see to their end, and return the exit code of the server.

    Args:
        serving: what is started.
        context: what the server is told.
        descriptor: that the server inherits.
        key: the variable with the key that the workers need.

    Raises:
        LaunchError: a host cannot be reached, or differs from this one. Nothing was started.
    """
    assert serving.placement is not None
    if not serving.placement.is_here:
        over_hosts.check(serving.placement, serving.script, {}, "nothing was started")
    with ExitStack() as stack:
        signals = stack.enter_context(_signals())
        server = stack.enter_context(_server([sys.executable, *serving.program], context, descriptor))
        workers = KnownWorkers(serving, context, key)
        stack.callback(workers.close)
        workers.connect()
        num_heeded, deadline = 0, 0.0
        while server.poll() is None:
            workers.look(_LOOK_SECONDS)
            if len(signals) > num_heeded:
                # A second signal, or one that is not obeyed, ends the server at once.
                server.send_signal(signals[num_heeded] if not num_heeded else signal.SIGKILL)
                num_heeded, deadline = len(signals), time.monotonic() + _END_SECONDS
            if num_heeded and time.monotonic() > deadline:
                server.kill()
        if server.returncode == 0:
            workers.wait(_FAREWELL_SECONDS)
    if signals and server.returncode:
        return 128 + signals[0]
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


class KnownWorkers:
    """The connections to the hosts of a server's workers."""

    def __init__(self, serving: Serving, server: JobContext, key: Mapping[str, str]) -> None:
        """`server` is what the server was told: its workers are of the same job."""
        self._serving, self._key = serving, key
        self._worker = JobContext(job=server.job, launcher=server.launcher, serves="worker")
        self._open: list[Connection] = []

    def connect(self) -> None:
        """Start the workers on all hosts, over connections that come about meanwhile."""
        assert self._serving.placement is not None
        for place in self._serving.places:
            is_here = place.host == self._serving.placement.own
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
                    _say(f"{connection.why_closed()}; its workers have ended")
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
def _server(command: Sequence[str], context: JobContext, descriptor: int) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            command,
            env=variables(context),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches this process only
            pass_fds=[descriptor],
            preexec_fn=end_with_parent(),  # noqa: PLW1509 (in the main thread, and no thread holds a lock)
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
    finally:
        os.close(descriptor)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


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
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        _say(f"worker {number} on {host} {how}; others go on")


def _say(text: str) -> None:
    with suppress(BrokenPipeError):
        print(f"mpitrain: {text}", file=sys.stderr, flush=True)
