"""Workers of a server on one host: starts them, forwards their output, and ends them with its connection.

Sent as text over one ssh connection, as the agent is (connections.py). So it imports only a module that comes with it,
and must run with old Pythons. The launcher sends {"beat": 1} every second, and this one JSON object per line:

    {"line": [number of the worker, 1 or 2 for stdout or stderr, text]}
    {"ended": [number, exit code, as subprocess has it]}
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import time
from typing import Any

from mpitrain.launch.hearing import Hearing, send

_END_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


class LocalWorker:
    """A worker, and what it prints: `streams` has what is still open."""

    def __init__(self, number: int, command: list[str], folder: str, variables: dict[str, str]) -> None:
        self.number = number
        self.is_reported = False
        self._ended = 0.0
        prctl = ctypes.CDLL(None).prctl
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),  # noqa: PLW1509 (no thread takes locks)
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.streams = {1: self.process.stdout, 2: self.process.stderr}
        self._begun = {1: b"", 2: b""}

    def read(self, stream: int) -> bool:
        """Forward the lines that have arrived. False: no more will come."""
        data = os.read(self.streams[stream].fileno(), 1 << 16)
        *lines, rest = (self._begun[stream] + data).split(b"\n")
        if not data and rest:
            lines, rest = [rest], b""
        self._begun[stream] = rest
        for line in lines:
            send({"line": [self.number, stream, line.decode(errors="replace")]})
        return bool(data)

    def end(self, number: int) -> None:
        """Send a signal to the worker and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def report(self) -> bool:
        """Send the exit code when the worker has ended and all its lines were sent. True: it was sent."""
        code = self.process.poll()
        if code is None or self.is_reported:
            return self.is_reported
        if not self._ended:
            self._ended = time.monotonic()
            self.end(signal.SIGKILL)  # what the worker has left, which may hold its stdout open
        if not self.streams or time.monotonic() - self._ended > _END_SECONDS:
            self.is_reported = True
            send({"ended": [self.number, code]})
        return self.is_reported


def main(wish: dict[str, Any], _: str) -> None:
    """Run until all workers have ended, or the connection has, or the launcher is silent for `silence_seconds`.

    `wish` has these, `folder`, `command`, and by worker `variables`: its whole environment but what is of this login.
    """
    hearing = Hearing(wish["silence_seconds"])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    kept = {name: os.environ[name] for name in ("HOME", "USER", "LOGNAME", "SHELL") if name in os.environ}
    cores = str(max(1, len(os.sched_getaffinity(0)) // len(wish["variables"])))
    workers = []
    try:
        for number, given in enumerate(wish["variables"], 1):
            variables = {"OMP_NUM_THREADS": cores, **given, **kept}
            workers.append(LocalWorker(number, wish["command"], wish["folder"], variables))
        _look(workers, hearing)
    except OSError as error:
        send({"line": [len(workers) + 1, 2, "{}: {}".format(wish["command"][0], error)]})
    finally:
        _end(workers)


def _look(workers: list[LocalWorker], hearing: Hearing) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        for worker in workers:
            for stream, source in worker.streams.items():
                selector.register(source, selectors.EVENT_READ, (worker, stream))
        while sum(worker.report() for worker in workers) < len(workers):
            events = selector.select(_LOOK_SECONDS)
            if hearing.is_lost(has_come=any(key.data is None for key, _ in events)):
                return
            for key, _ in events:
                if key.data is None:
                    if not os.read(0, 1 << 16):
                        return
                    continue
                worker, stream = key.data
                if not worker.read(stream):
                    selector.unregister(key.fileobj)
                    del worker.streams[stream]


def _end(workers: list[LocalWorker]) -> None:
    deadline = time.monotonic() + _END_SECONDS
    for worker in workers:
        worker.end(signal.SIGTERM)
    while any(worker.process.poll() is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    for worker in workers:
        worker.end(signal.SIGKILL)
        worker.process.wait()
