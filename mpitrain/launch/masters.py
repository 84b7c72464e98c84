"""Connections to the hosts of the next try that are open before mpiexec needs them: its ssh then logs in nowhere.

A login takes both machines some 0.1 s of processor time, and a restart waits for it. These are the master connections
of OpenSSH (ControlMaster of ssh_config(5)). Where one has broken, mpiexec's ssh logs in as always.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mpitrain.launch.connections import GUARD_OPTIONS, SSH_OPTIONS
from mpitrain.launch.processes import end_with_parent, left_out

# A socket's path has 107 bytes at most: unix(7). ssh adds a hash of 40 (%C), and 17 while it makes the socket. Other
# signs may mean something to ssh.
_FOLDER = re.compile(rf"[\w/.+-]{{1,{107 - 1 - 40 - 17}}}", re.ASCII)
# A firewall may forget a connection without traffic, which would then hang.
_ALIVE_SECONDS = 15
_END_SECONDS = 1.0


@contextmanager
def open_masters(hosts: Iterable[str], folder: Path) -> Iterator[list[str]]:
    """Connect to the hosts, and yield the options with which ssh finds these connections. Does not wait for them.

    Call this in the main thread. If the path of `folder`, for the sockets, is too long for ssh or has odd signs, no
    connection is made, and no options are yielded.

    Raises:
        OSError: ssh cannot be started here.
    """
    if not _FOLDER.fullmatch(str(folder)):
        yield []
        return
    options = ["-o", f"ControlPath={folder}/%C"]
    masters: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(_end, masters)
        for host in hosts:
            stays = ["-N", "-o", "ControlMaster=yes", "-o", f"ServerAliveInterval={_ALIVE_SECONDS}"]
            master = subprocess.Popen(
                ["ssh", *stays, *options, *SSH_OPTIONS, *GUARD_OPTIONS, host],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
                preexec_fn=end_with_parent(),  # noqa: PLW1509 (no thread holds a lock that it takes)
            )
            masters.append(master)
            stack.enter_context(left_out({master.pid}))
        yield [*options, "-o", "ControlMaster=no"]  # mpiexec's ssh is no master, whatever the user's settings are


def _end(masters: Iterable[subprocess.Popen[bytes]]) -> None:
    """End them, and with them their processes for ProxyJump, which SIGKILL would leave."""
    for master in masters:
        master.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for master in masters:
        try:
            master.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            master.kill()
            master.wait()
