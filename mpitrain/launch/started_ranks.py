"""What starts the ranks of an attempt, and passes on their output, their signals and their end: mpiexec, or the agents.

run.py reads both in one way. mpiexec is a child of the launcher, with a pipe for each stream, in which tags say whose
a piece is. The agents of the hosts (host_ranks.py) are there already. They start ranks that need no MPI, without
mpiexec's logins, daemons and first program of each rank, and say whose a piece is.
"""

from __future__ import annotations

import base64
import os
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpitrain.errors import LaunchError
from mpitrain.launch import processes
from mpitrain.launch.dialects import JobSpec, LaunchCommand
from mpitrain.launch.output import Stream
from mpitrain.launch.rank import hooked
from mpitrain.launch.variables import is_of_login
from mpitrain.launch.watch import AttemptOnHosts

_READ_BYTES = 1 << 16
# When a rank has failed, the others have this long to end by themselves, for example to write a checkpoint.
_END_SECONDS = 5.0
# How the names of variables begin in which another launcher has told this process that it is a rank of MPI.
_OF_OTHER_MPI = ("PMI_", "PMIX_", "OMPI_COMM_WORLD", "OMPI_UNIVERSE", "MPI_LOCAL")
_STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}


class RawOutput(NamedTuple):
    """What was written. `rank` is None where tags in `data` say whose it is."""

    stream: Stream
    rank: int | None
    data: bytes


class StartedRanks(Protocol):
    """The ranks of an attempt. The main thread calls."""

    ends_others: str  # what ends the other ranks when one has failed

    def start(self) -> None:
        """Start them. Raises LaunchError if that cannot be."""

    @property
    def is_open(self) -> bool:
        """True while more output may come."""

    def read(self, timeout_seconds: float) -> list[RawOutput]:
        """Return the output that comes within that time; none: there is none."""

    def poll(self) -> int | None:
        """Return the exit code of all, as mpiexec gives it; None: they have not ended. A signal's number is below 0."""

    def wait(self, timeout_seconds: float) -> int:
        """Wait for their end. Raises subprocess.TimeoutExpired."""

    def send_signal(self, number: int) -> None:
        """Have all ranks get this signal. They are then about to end."""

    def give_up(self) -> None:
        """Others end the processes that remain: wait for nothing more."""

    def close(self) -> None:
        """Close what was opened."""


class MpiexecRanks:
    """Ranks that mpiexec starts."""

    ends_others = "mpiexec"

    def __init__(self, command: LaunchCommand) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes = selectors.DefaultSelector()

    def start(self) -> None:
        """See StartedRanks."""
        arguments = self._command.arguments
        try:
            environment = {**os.environ, **self._command.environment}
            self._process = processes.start_child(
                arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise LaunchError(f"{arguments[0]} cannot be run: {error.strerror}") from error
        for stream, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes.register(pipe, selectors.EVENT_READ, stream)

    @property
    def is_open(self) -> bool:
        """See StartedRanks."""
        return bool(self._pipes.get_map())

    def read(self, timeout_seconds: float) -> list[RawOutput]:
        """See StartedRanks."""
        pieces = []
        for key, _ in self._pipes.select(timeout_seconds) if self.is_open else ():
            data = os.read(key.fd, _READ_BYTES)
            if data:
                pieces.append(RawOutput(key.data, None, data))
            else:
                self._pipes.unregister(key.fileobj)
        return pieces

    def poll(self) -> int | None:
        """See StartedRanks."""
        assert self._process is not None
        return self._process.poll()

    def wait(self, timeout_seconds: float) -> int:
        """See StartedRanks."""
        assert self._process is not None
        return self._process.wait(timeout_seconds)

    def send_signal(self, number: int) -> None:
        """See StartedRanks. Some mpiexecs do not know SIGHUP."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def give_up(self) -> None:
        """See StartedRanks."""
        self.poll()

    def close(self) -> None:
        """See StartedRanks."""
        self._pipes.close()
        if self._process is not None:
            # Not Popen's own `with`, which would wait for ever for a process that cannot be killed.
            for pipe in (self._process.stdout, self._process.stderr):
                assert pipe is not None
                pipe.close()
            self._process.poll()


class AgentRanks:
    """Ranks that the agents of their hosts start. The thread of the agents calls `hear`."""

    ends_others = "mpitrain"

    def __init__(self, job: JobSpec, command: LaunchCommand, attempt: AttemptOnHosts) -> None:
        self._job, self._command, self._attempt = job, command, attempt
        self._news = threading.Condition()
        self._output: deque[tuple[str, RawOutput]] = deque()  # each with the host
        self._exits: dict[int, int] = {}  # by rank, in the order in which they were heard
        self._is_over = self._are_told = False
        self._kill_at = float("inf")

    def start(self) -> None:
        """See StartedRanks."""
        self._attempt.heard_ranks = self.hear
        own = {**os.environ, **self._command.environment}
        variables = hooked({name: value for name, value in own.items() if not name.startswith(_OF_OTHER_MPI)})
        for place in self._job.placement.places:
            is_own = place.host == self._job.placement.own
            told = {name: value for name, value in variables.items() if is_own or not is_of_login(name)}
            start = {
                "program": list(self._command.arguments),
                "folder": str(Path.cwd()),
                "variables": {**told, **self._job.of_hosts.get(place.host, {})},
                "first": place.first_rank,
                "count": place.num_ranks,
            }
            self._attempt.tell(place.host, {"start": start})

    def hear(self, host: str, message: Mapping[str, Any]) -> None:
        """Take in a message of the agent of `host`."""
        with self._news:
            for rank, stream, data in message.get("output", ()):
                self._output.append((host, RawOutput(_STREAMS[stream], rank, base64.b64decode(data))))
            self._exits.update(message.get("exits", ()))
            self._news.notify_all()

    @property
    def is_open(self) -> bool:
        """See StartedRanks. After their end, the last word of each agent brings the rest."""
        return not self._is_over and self._code() is None

    def read(self, timeout_seconds: float) -> list[RawOutput]:
        """See StartedRanks."""
        with self._news:
            num_ended = len(self._exits)
            self._news.wait_for(lambda: self._output or len(self._exits) != num_ended, timeout_seconds)
            heard = list(self._output)
            self._output.clear()
        sizes: dict[str, int] = {}
        for host, piece in heard:
            sizes[host] = sizes.get(host, 0) + len(piece.data)
        for host, size in sizes.items():
            self._attempt.tell(host, {"taken": size})
        return [piece for _, piece in heard]

    def poll(self) -> int | None:
        """See StartedRanks. It is the code of the first rank that failed, because of which the others are ended."""
        has_failed = any(self._exits.copy().values())
        now = time.monotonic()
        if has_failed and not self._are_told:
            self.send_signal(signal.SIGTERM)
            self._kill_at = now + _END_SECONDS
        elif now >= self._kill_at:
            self._kill_at = float("inf")
            self._tell_all(signal.SIGKILL)
        return self._code()

    def wait(self, timeout_seconds: float) -> int:
        """See StartedRanks."""
        with self._news:
            self._news.wait_for(lambda: self._code() is not None, 0.0 if self._is_over else timeout_seconds)
        code = self._code()
        if code is None and not self._is_over:
            raise subprocess.TimeoutExpired(self._command.arguments[0], timeout_seconds)
        return 1 if code is None else code

    def send_signal(self, number: int) -> None:
        """See StartedRanks."""
        self._are_told = True
        self._tell_all(number)

    def give_up(self) -> None:
        """See StartedRanks."""
        self._is_over = True

    def close(self) -> None:
        """See StartedRanks."""

    def _tell_all(self, number: int) -> None:
        for place in self._job.placement.places:
            self._attempt.tell(place.host, {"signal": int(number)})

    def _code(self) -> int | None:
        exits = self._exits.copy()
        if len(exits) < self._job.placement.num_ranks:
            return None
        return next((code for code in exits.values() if code), 0)


def ranks_of(job: JobSpec, command: LaunchCommand, attempt: AttemptOnHosts) -> StartedRanks:
    """Return the ranks of `job`; none is started yet."""
    return MpiexecRanks(command) if job.mpiexec is not None else AgentRanks(job, command, attempt)
