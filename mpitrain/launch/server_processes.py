"""The servers of one job, as processes of this machine. The first one decides; all end together.

first ends ──────> the others have heard so, and end; what is left of them is ended
another fails ───> the first one notices, names it, and ends; a first one that does not notice is ended

After its run, the first one needs the others no more: then the failure of another one ends nothing. The first one says
so in what it publishes for `mpitrain ps`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from mpitrain.errors import LaunchError
from mpitrain.job.context import JobContext
from mpitrain.launch.processes import end_with_parent
from mpitrain.launch.roster import served
from mpitrain.launch.served import variables

# How long the others have to end when the first one has ended well.
_END_SECONDS = 10.0
# How long the first server has to notice that another one has failed. It may be in a hook meanwhile.
_NOTICE_SECONDS = 60.0
_LOOK_SECONDS = 0.05


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
                say(f"server {number} {how_ended(code)} after the run; server 0 goes on without it")
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
        deadline = time.monotonic() + (_END_SECONDS if code == 0 else 0.0)
        while time.monotonic() < deadline and any(process.poll() is None for process in self._others):
            time.sleep(_LOOK_SECONDS)
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
                process = subprocess.Popen(
                    command,
                    env=variables(context),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
                    pass_fds=[descriptor],
                    preexec_fn=end_with_parent(),  # noqa: PLW1509 (in the main thread, and no thread holds a lock)
                )
                processes.append(process)
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


def how_ended(code: int) -> str:
    """Return how a process has ended, in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def say(text: str) -> None:
    """Print a line to stderr, if anybody reads it."""
    with suppress(BrokenPipeError):
        print(f"mpitrain: {text}", file=sys.stderr, flush=True)
