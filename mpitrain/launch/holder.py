"""The warm interpreter of a job on a host: it forks the ranks of the next attempts. A part of the agent (agent.py).

A restart is quick with it, because a rank spends most of its start on imports. mpiexec starts a stub (stub.py) in place
of each rank. The stub lends its place to a fork, or becomes the program itself, which is a cold start. The interpreter
(mpitrain.job.warm) imports what a rank has published that it has imported, in the environment of that rank. It and its
ranks end with the agent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Container
from typing import Any

from mpitrain.context import IMPORTS, LAUNCHER, OF_MPIEXEC, PREFIX, WARM, WARM_LINE, WARM_ROOM
from mpitrain.launch.hearing import send
from mpitrain.launch.processes import Marked, end_with_agent
from mpitrain.reading import message_of
from mpitrain.watching.proc import opened, read

_ROOM_BYTES = 512
_TAIL_BYTES = 4096
_MOST_BYTES = 1024
_END_SECONDS = 5.0
_LOOK_SECONDS = 2.0


class Holder:
    """Keeps the interpreter. Call `look` when one of `files` is readable, and twice a second."""

    def __init__(self, limit: tuple[int, int]) -> None:
        """`limit` is that of open files for the interpreter, as for any rank."""
        self._wanted: dict[str, Any] | None = None  # what to start as soon as a rank has listed its imports
        self._name = self._token = ""
        self._mark = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._output = -1  # what the interpreter prints, until its end
        self._words = b""  # the last of that
        self._is_done = False  # it has said why it is of no use any more
        self._has_given_up = False
        self._looked = 0.0
        self._limit = limit

    def files(self) -> list[int]:
        """What is readable when there is news."""
        if self._line is None:
            return []
        return [self._line.fileno(), *([] if self._output < 0 else [self._output])]

    def start(self, name: str, token: str, launcher: str, program: list[str], hook: str, folder: str) -> None:
        """Keep an interpreter from now on.

        Stubs call it by `name`. `token` marks it; `launcher` is the mark of the job's ranks. It is for `program`, and
        `hook` on PYTHONPATH makes it a warm one. `folder` is that in which ranks begin.
        """
        self._name, self._token, self._mark = name, token, f"{LAUNCHER}={launcher}".encode()
        self._wanted = {"program": program, "hook": hook, "folder": folder}

    def look(self, ready: Container[int]) -> None:
        """Take in the news of these files, and start the interpreter if it is missing."""
        if self._output in ready:
            data = os.read(self._output, 1 << 16)
            self._words = (self._words + data)[-_TAIL_BYTES:]
            if not data:
                self._close_output()
        if self._line is not None and self._line.fileno() in ready:
            self._listen_to(self._line)
        now = time.monotonic()
        is_missing = self._wanted is not None and self._process is None and not self._has_given_up
        if is_missing and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._start_from_rank()

    def close(self) -> None:
        """Kill the interpreter and its ranks, with all that they have started."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        if self._token:
            Marked(self._token, WARM).end(0.0)

    def _start_from_rank(self) -> None:
        """Look for a rank of the job that has listed its imports, and start the interpreter as it was started."""
        for entry in os.listdir("/proc"):  # noqa: PTH208 (names are wanted, many, often)
            variables = read(f"/proc/{entry}/environ").split(b"\0") if entry.isdigit() else []
            if self._mark not in variables:
                continue
            listing = next((path for path, what in opened(int(entry)) if what.startswith(f"/memfd:{IMPORTS} ")), "")
            with contextlib.suppress(OSError):  # there is none, or it has just ended
                listed = os.open(listing, os.O_RDONLY)
                try:
                    self._start(variables, listed)
                except (OSError, subprocess.SubprocessError) as error:
                    self._give_up(f"ranks start cold: no warm interpreter can be started: {error}")
                finally:
                    os.close(listed)
                return

    def _start(self, variables: list[bytes], listed: int) -> None:
        wanted, self._wanted = self._wanted or {}, None
        environment = dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)
        # It must not take itself for a rank, nor be taken for one.
        told = tuple(prefix.encode() for prefix in (*OF_MPIEXEC, PREFIX))
        environment = {name: value for name, value in environment.items() if not name.startswith(told)}
        path = environment.get(b"PYTHONPATH")
        line, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words, output = os.pipe()
        own = {
            WARM: self._token,
            WARM_LINE: f"{far_end.fileno()} {listed} {self._name}",
            WARM_ROOM: "." * _ROOM_BYTES,
            "PYTHONPATH": os.pathsep.join([wanted["hook"], *([] if path is None else [os.fsdecode(path)])]),
        }
        environment.update((name.encode(), os.fsencode(value)) for name, value in own.items())
        try:
            self._process = subprocess.Popen(
                wanted["program"],
                env=environment,
                cwd=wanted["folder"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[far_end.fileno(), listed],
                preexec_fn=end_with_agent(self._limit),  # noqa: PLW1509 (no thread holds a lock that it takes)
            )
        except BaseException:
            line.close()
            os.close(words)
            raise
        finally:
            far_end.close()
            os.close(output)
        self._line, self._output, self._words, self._is_done = line, words, b"", False

    def _listen_to(self, line: socket.socket) -> None:
        """Receive what the interpreter sends: that it is ready, or why it is of no use any more."""
        try:
            data = line.recv(_MOST_BYTES)
            told = message_of(data.decode(errors="replace")) if data else {}
        except (OSError, ValueError):
            told = {}
        if "refused" in told:  # the next attempt that trains shows what ranks need then
            self._is_done = True
            _say(f"ranks start cold: {told['refused']}")
        elif "unfit" in told:
            self._is_done = True
            self._give_up(f"ranks start cold: {told['unfit']}")
        elif "ready" not in told:
            self._end(line)

    def _end(self, line: socket.socket) -> None:
        """The interpreter has ended. Its ranks get SIGKILL from the kernel."""
        line.close()
        code = self._process.wait() if self._process is not None else 0
        self._process = self._line = None
        if not self._is_done:
            if self._output >= 0:
                os.set_blocking(self._output, False)
                with contextlib.suppress(OSError):
                    self._words = (self._words + os.read(self._output, 1 << 16))[-_TAIL_BYTES:]
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            words = "".join(self._words.decode(errors="replace").strip().splitlines()[-1:])
            self._give_up(f"the warm interpreter {how}{': ' * bool(words)}{words}. Ranks start cold from now on")
        self._close_output()

    def _close_output(self) -> None:
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def _give_up(self, why: str) -> None:
        """Start no other interpreter: what happened would happen again."""
        self._has_given_up = True
        _say(why)


def _say(text: str) -> None:
    send({"warm": {"said": f"{socket.gethostname()}: {text}"}})
