"""Asks the hosts that an elastic job does not have, but could, whether they let this machine log in; reads its
inventory.

What follows is for the policy (changes.py). A thread asks, one round after the other, and only while the hosts of the
job can change.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from mpitrain.errors import ConfigError
from mpitrain.launch.connections import command_on
from mpitrain.launch.events import Event, Listed
from mpitrain.launch.log import say
from mpitrain.launch.processes import start_beside

# ssh gives up by itself after 10 s without an answer. A frozen host accepts the connection, but sends nothing.
_LOGIN_SECONDS = 20.0
_LOGIN_LOOK_SECONDS = 0.2


def that_let_in(hosts: Iterable[str], stop: threading.Event) -> set[str]:
    """Return those of the hosts on which `true` runs by ssh. Nothing is printed, and `stop` ends the wait.

    Raises:
        OSError: ssh cannot be started here.
    """
    deadline = time.monotonic() + _LOGIN_SECONDS
    asked: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for host in hosts:
            asked[host] = start_beside(
                stack, command_on(host, "true"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(_end, asked[host])
        while any(process.poll() is None for process in asked.values()) and time.monotonic() < deadline:
            if stop.wait(_LOGIN_LOOK_SECONDS):
                break
        return {host for host, process in asked.items() if process.poll() == 0}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


_LOOK_SECONDS = 1.0


class Intake:
    """`look` reads the inventory and lets the hosts be asked; from `begin` on, a thread does so."""

    def __init__(
        self,
        take: Callable[[Event], object],
        is_open: Callable[[], bool],
        listed: Callable[[], Sequence[str] | None],
        stop: threading.Event,
    ) -> None:
        """`take` takes events in, and asks hosts. For `listed` see Supervisor. `stop` ends the thread."""
        self._take, self._is_open, self._listed, self._stop = take, is_open, listed, stop
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def begin(self) -> None:
        """Read the inventory, and begin to look."""
        self.read()
        self._thread.start()

    def close(self) -> None:
        """Wait a moment for the thread, after `stop` is set."""
        if self._thread.ident is not None:
            self._thread.join(2 * _LOGIN_LOOK_SECONDS)  # it may be asking a host, which takes longer

    def read(self) -> None:
        """Read the inventory, and do what follows. Takes seconds."""
        try:
            listed = self._listed()
        except ConfigError as error:
            event = Listed(time.monotonic(), None, str(error))
        else:
            event = Listed(time.monotonic(), None if listed is None else tuple(listed))
        self._take(event)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                if self._is_open():
                    self.read()
            except Exception as error:  # nobody looks at a thread's error, and the job can train without it
                say(f"no host is taken in by itself any more: {error!r}")
                return
