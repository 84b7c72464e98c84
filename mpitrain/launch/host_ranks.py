"""The ranks of an attempt on this host that its agent has started itself, because they need no MPI (agent.py).

    launcher: {"start": {"program": [word...], "folder", "variables", "first": rank, "count": number}}
                                                  agent: {"exits": [[rank, exit code, or the number
                                                         of a signal below 0]...]}
                                                  agent: {"unable": why a rank cannot be started}
                                                  agent: {"output": [[rank, 1 or 2, base64]...]}
    launcher: {"taken": so many bytes of output}, which have been printed
    launcher: {"signal": number}, for all ranks

The agent reads so much output ahead of the launcher, and no more: a rank then waits, as it would for a full pipe.

Sent to other hosts as text. So this module imports only the modules that come with it, and must run with old Pythons.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.context import RANK, TF_WORKERS, tf_config
from mpitrain.error_file import ERROR_FILE
from mpitrain.launch.processes import end_with_agent
from mpitrain.watching.census import Census

_AHEAD_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class HostRanks:
    """They end with the agent, by SIGKILL from the kernel. Call `look` when `fileno` is readable."""

    def __init__(self, census: Census, send: Callable[[dict[str, Any]], None], limit: tuple[int, int]) -> None:
        """None is started yet.

        Args:
            census: it gets the ranks.
            send: takes the messages to the launcher.
            limit: how many files a rank may open.
        """
        self._census, self._send, self._limit = census, send, limit
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank, those that have not ended
        self._pipes: dict[int, tuple[int, int]] = {}  # by descriptor: the rank, and 1 or 2
        self._ready = select.epoll()
        self._room_bytes = _AHEAD_BYTES

    def files(self) -> Sequence[int]:
        """Descriptors for poll: readable when there is output that the launcher has room for."""
        return [self._ready.fileno()] if self._pipes and self._room_bytes > 0 else []

    def start(self, program: list[str], folder: str, variables: dict[str, str], first: int, count: int) -> None:
        """Start these ranks, with `variables` beside those of the agent; or say why that cannot be."""
        for number in range(count):
            rank = first + number
            own: dict[str, int | str] = {"RANK": rank, "ROLE_RANK": rank, RANK: rank}
            own.update({"LOCAL_RANK": number, "LOCAL_WORLD_SIZE": count})
            if TF_WORKERS in variables:
                own["TF_CONFIG"] = tf_config(variables[TF_WORKERS], rank)
            environment = {**os.environ, **variables, **{name: str(value) for name, value in own.items()}}
            try:
                self._start(rank, program, folder, environment)
            except (OSError, subprocess.SubprocessError) as error:
                why = f"rank {rank} cannot be started: {program[0]} in {folder}: {error}"
                self._send({"unable": why})
                return

    def _start(self, rank: int, program: list[str], folder: str, environment: dict[str, str]) -> None:
        errors = os.memfd_create("mpitrain-errors")  # nothing of it is left on this host
        environment[ERROR_FILE] = f"/proc/{os.getpid()}/fd/{errors}"
        try:
            process = subprocess.Popen(
                program,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=end_with_agent(self._limit),  # noqa: PLW1509 (no thread holds a lock that it takes)
            )
        except BaseException:
            os.close(errors)
            raise
        self._processes[rank] = process
        self._census.add(rank, process.pid, errors)
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, pipe in ((1, process.stdout), (2, process.stderr)):
            descriptor = os.dup(pipe.fileno())
            pipe.close()
            os.set_blocking(descriptor, False)
            self._pipes[descriptor] = rank, stream
            self._ready.register(descriptor, select.EPOLLIN)

    def look(self) -> None:
        """Send what ranks have written, and how they have ended. Call this after the census has looked."""
        if self._room_bytes > 0:
            self._send_output(list(dict(self._ready.poll(0)).keys() & self._pipes.keys()))
        ended = {rank: one for rank, one in self._processes.items() if self._census.has_ended(rank)}
        if not ended:
            return
        for rank, process in ended.items():
            del self._processes[rank]
            self._census.note_code(rank, process.wait())
        self._send_output([descriptor for descriptor, (rank, _) in self._pipes.items() if rank in ended])
        self._send({"exits": [[rank, process.returncode] for rank, process in ended.items()]})

    def take(self, message: dict[str, Any]) -> None:
        """Do what the launcher says."""
        if "start" in message:
            self.start(**message["start"])
        self._room_bytes += message.get("taken", 0)
        for process in self._processes.values() if "signal" in message else ():
            with contextlib.suppress(OSError):
                process.send_signal(message["signal"])

    def close(self) -> None:
        """When the processes of the job have been ended: send the rest of their output."""
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # it cannot be killed
                process.wait(0.1)
        while self._pipes and self._send_output(list(self._pipes)):
            pass
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes.clear()
        self._ready.close()

    def _send_output(self, descriptors: Sequence[int]) -> bool:
        """Send what can be read there now. False: that is nothing."""
        pieces = []
        for descriptor in descriptors:
            rank, stream = self._pipes[descriptor]
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                continue
            if not data:
                self._ready.unregister(descriptor)
                del self._pipes[descriptor]
                os.close(descriptor)
                continue
            self._room_bytes -= len(data)
            pieces.append([rank, stream, base64.b64encode(data).decode()])
        if pieces:
            self._send({"output": pieces})
        return bool(pieces)
