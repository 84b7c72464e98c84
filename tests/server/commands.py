"""`mpitrain serve` and `mpitrain work` as processes of a test, each with what it has printed so far."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from free_ports import free_ports_in_a_row
from jobs import HANG_SECONDS, REPOSITORY, TOKEN, clean_environment, kill_all, processes_of
from mpitrain.context import JobContext

TRAIN = [str(REPOSITORY / "examples/train.py"), "--data", "digits", "--strategy", "parameter_server"]
_PROGRAMS = str(Path(sys.executable).parent)


class Commands:
    """The commands of one test, in a folder of its own. Nothing of them is left when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self._token = uuid.uuid4().hex
        self._started: list[Command] = []
        self.port = free_ports_in_a_row(3)

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        try:
            if kind is None:
                assert processes_of(self._token, patience=60.0) == []
                # MPICH's name for the memory of a process, which a killed process leaves.
                left = [Path(f"/dev/shm/mpich_shm_{command.process.pid:x}_0") for command in self._started]
                assert not any(path.exists() for path in left)
        finally:
            kill_all(self._token)
            for command in self._started:
                command.process.wait()

    def serve(self, *options: str, program: Sequence[str] = (), **settings: str) -> Command:
        """Start a server."""
        return self.start(["mpitrain", "serve", "--port", str(self.port), *options, *program], **settings)

    def work(self, *program: str, **settings: str) -> Command:
        """Start a worker, which has the server's state folder, and so its key."""
        return self.start(["mpitrain", "work", f"127.0.0.1:{self.port}", *program], **settings)

    def start(self, words: Sequence[str], **settings: str) -> Command:
        """Start a command, with these variables in its environment."""
        environment = clean_environment({"XDG_STATE_HOME": str(self.state), **settings})
        environment |= {TOKEN: self._token, "PATH": f"{_PROGRAMS}:{os.environ['PATH']}"}
        output = self.folder / f"output-{len(self._started)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                words,
                env=environment,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        command = Command(process, output)
        self._started.append(command)
        return command


def contexts_of(command: Command) -> dict[int, JobContext]:
    """By process: what those below this command are told."""
    found: dict[int, JobContext] = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        context = JobContext.read(dict(word.partition("=")[::2] for word in words))
        if context.launcher.split()[1:2] == [str(command.process.pid)]:
            found[int(entry.name)] = context
    return found


def processes(command: Command, serves: str) -> list[int]:
    """The processes below this command that are of this kind."""
    return sorted(pid for pid, context in contexts_of(command).items() if context.serve.kind == serves)


class Command:
    """A command that was started."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self.process, self._path = process, path

    @property
    def output(self) -> str:
        """What it has printed so far, on both streams."""
        return self._path.read_text(errors="replace")

    def until(self, holds: str | Callable[[str], bool]) -> str:
        """Wait until it has printed a text that matches. Return the output."""
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            has_ended = self.process.poll() is not None  # ask before reading
            output = self.output
            if holds(output) if callable(holds) else re.search(holds, output):
                return output
            assert not has_ended and time.monotonic() < deadline, output
            time.sleep(0.05)

    def end(self) -> int:
        """Wait for its end. Return the exit code."""
        try:
            return self.process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.output) from None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        self.process.send_signal(number)
