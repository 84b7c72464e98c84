"""Servers, as processes of this machine, with workers on known hosts: a connection to each host starts its workers.

hosts are compared ─> servers ─> connections ─> workers ─> the first server ends ─> what is left is ended

first ends ──────> the others have heard so, and end; processes that remain are ended
another fails ───> the first one notices, names it, and ends; a first one that does not notice is ended

After its run, the first one needs the others no more: then the failure of another one ends nothing. The first one says
so in what it publishes for `mpitrain ps`.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.config import Config
from mpitrain.context import JobContext, ServeTask
from mpitrain.errors import LaunchError
from mpitrain.launch import over_hosts
from mpitrain.launch.connections import Connection, connect
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.processes import start_child
from mpitrain.launch.roster import served
from mpitrain.launch.served import how_ended, say, show_sizes, variables
from mpitrain.launch.variables import is_of_login

# How long the others have to end when the first one has ended well.
_OTHERS_END_SECONDS = 10.0
# How long the first server has to notice that another one has failed. It may be in a hook meanwhile.
_NOTICE_SECONDS = 60.0
_OTHERS_LOOK_SECONDS = 0.05


class ServerProcesses:
    """The first server, and the others. Make it with `started`."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._first, *self._others = processes
        self._failed: dict[int, int] = {}  # codes of further servers that the run needed, by number
        self._unneeded: set[int] = set()  # those that have failed after the run
        self._signals: list[int] = []
        self._deadline = float("inf")

    def look(self) -> int | None:
        """See to servers that have failed. Return the exit code of the first server if it has ended."""
        first = self._first.poll()  # before the others, so that one whose failure has ended it is seen
        if first == 0:
            return first
        for number, process in enumerate(self._others, 1):
            code = process.poll()
            if code and number not in self._failed and number not in self._unneeded:
                self._take_failure(number, code)
        if first is not None:
            return first
        if time.monotonic() > self._deadline:
            if served(self._first.pid).get("stage", "runs") == "runs":  # otherwise it has noticed
                self._first.kill()
            self._deadline = float("inf")
        return None

    def _take_failure(self, number: int, code: int) -> None:
        told = served(self._first.pid)
        if told.get("stage", "runs") != "runs" and not told["has_failed"]:
            self._unneeded.add(number)
            if not self._signals:
                say(f"server {number} {how_ended(code)} after the run; server 0 continues without it")
            return
        self._failed[number] = code
        if not self._signals:
            say(f"server {number} {how_ended(code)}; the job ends with it")
            self._deadline = min(self._deadline, time.monotonic() + _NOTICE_SECONDS)

    def signal(self, number: int) -> None:
        """Pass a signal on to the first server, which may be writing a checkpoint. A second one ends it at once."""
        self._first.send_signal(signal.SIGKILL if self._signals else number)
        self._signals.append(number)

    def finish(self) -> int:
        """Let the others end, as the first one has. Return the exit code of the job."""
        code = self._first.wait()
        if code < 0 and self._others and not self._signals and not self._failed:
            say(f"server 0 {how_ended(code)}; the other servers end too")
        deadline = time.monotonic() + (_OTHERS_END_SECONDS if code == 0 else 0.0)
        while time.monotonic() < deadline and any(process.poll() is None for process in self._others):
            time.sleep(_OTHERS_LOOK_SECONDS)
        self.kill()
        if self._signals and code:
            return 128 + self._signals[0]
        if code == -signal.SIGKILL and self._failed:  # it did not notice
            code = next(iter(self._failed.values()))
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """End all that are left."""
        _kill([self._first, *self._others])


@contextmanager
def started(command: Sequence[str], contexts: Sequence[JobContext], descriptor: int) -> Iterator[ServerProcesses]:
    """Start a server for each of these contexts. At the end of the `with`, nothing of them is left.

    Args:
        command: of each.
        contexts: what each is told; the first one is of the first server.
        descriptor: that all inherit.

    Raises:
        LaunchError: the program cannot be started.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        try:
            for context in contexts:
                one = start_child(command, env=variables(context), pass_fds=[descriptor])
                processes.append(one)
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
        finally:
            os.close(descriptor)
        yield ServerProcesses(processes)
    finally:
        _kill(processes)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


_MODULES = ("launch.hearing", "launch.worker_host")
_LOOK_SECONDS, _BEAT_SECONDS = 0.2, 1.0
# Workers that hear nothing from their server give up after this time too, if MPITRAIN_HANG_SECONDS is not set.
_SILENCE_SECONDS = Config.hang_seconds
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
        self._worker = JobContext(job=server.job, launcher=server.launcher, serve=ServeTask("worker"))
        self._open: list[Connection] = []
        self._beaten = 0.0

    def connect(self) -> None:
        """Start the workers on all hosts, over connections that come about meanwhile."""
        placement = self._serving.placement
        for place in self._serving.places:
            is_here = placement is not None and place.host == placement.own
            self._open.append(connect(place.host, is_here, self._wish(place), time.monotonic(), _MODULES))

    def look(self, seconds: float) -> None:
        """Print what has come within so many seconds."""
        outputs = {connection.output: connection for connection in self._open}
        is_due = time.monotonic() - self._beaten >= _BEAT_SECONDS
        self._beaten = time.monotonic() if is_due else self._beaten
        for connection in self._open:
            if is_due:
                connection.send({"beat": 1})
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
        """End the workers that remain."""
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
            "silence_seconds": _SILENCE_SECONDS,
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
        say(f"worker {number} on {host} {how_ended(code)}; others continue")
