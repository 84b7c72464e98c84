"""Which hosts let this user in: the cheapest question to a host that may be down. Call this in a thread."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack

from mpitrain.launch.connections import command_on
from mpitrain.launch.processes import STARTING, end_with_parent, left_out

# ssh gives up by itself after 10 s without an answer. A frozen host accepts the connection and says no more.
_ANSWER_SECONDS = 20.0
_LOOK_SECONDS = 0.2


def that_let_in(hosts: Iterable[str], stop: threading.Event) -> set[str]:
    """Return those of the hosts on which `true` runs by ssh. Nothing is printed, and `stop` ends the wait.

    Raises:
        OSError: ssh cannot be started here.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    asked: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for host in hosts:
            with STARTING:
                asked[host] = subprocess.Popen(
                    command_on(host, "true"),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
                    # The kernel watches over the thread that forks: this one, which lives as long as the launcher.
                    preexec_fn=end_with_parent(),  # noqa: PLW1509 (no thread holds a lock that it takes)
                )
                stack.enter_context(left_out({asked[host].pid}))
            stack.callback(_end, asked[host])
        while any(process.poll() is None for process in asked.values()) and time.monotonic() < deadline:
            if stop.wait(_LOOK_SECONDS):
                break
        return {host for host, process in asked.items() if process.poll() == 0}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
