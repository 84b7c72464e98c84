"""When a connection of a process to itself was closed, by the kernel."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from mpitrain.watching.roll_call import connect_to_self, listen, receive, when_closed

TICKS_SECONDS = 0.02  # the kernel's ticks, at both ends of a time


def test_the_time_of_a_kill_is_known_however_late_somebody_asks() -> None:
    pair = connect_to_self()
    assert pair is not None
    near, far = pair
    child = os.fork()
    if child == 0:
        far.close()
        signal.pause()
    near.close()
    before = time.monotonic()
    assert before <= when_closed(far.fileno()) <= time.monotonic()  # it is still open
    time.sleep(1)
    before = time.monotonic()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    after = time.monotonic()
    time.sleep(1)
    assert before - TICKS_SECONDS < when_closed(far.fileno()) < after + TICKS_SECONDS
    far.close()


# A rank that makes a connection after it has answered the roll call, as MPI does in MPI_Init.
RANK = """
import socket, sys, time
from mpitrain.watching.activity import publish
activity = publish(0)
activity.appear(sys.argv[1])
connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
time.sleep(1000)
"""


def test_the_end_of_a_rank_closes_the_witness_and_the_line_before_what_mpi_has_open(tmp_path: Path) -> None:
    """Other ranks notice the end when MPI's files close, and end too; on a busy host maybe before all is closed."""
    path = str(tmp_path / "roll_call")
    with ExitStack() as stack:
        listener, mpi = (stack.enter_context(each) for each in (listen(path), socket.create_server(("127.0.0.1", 0))))
        rank = subprocess.Popen([sys.executable, "-c", RANK, path, str(mpi.getsockname()[1])])
        stack.callback(rank.wait)
        stack.callback(rank.kill)
        connection, line = (stack.enter_context(each.accept()[0]) for each in (mpi, listener))
        said = receive(line)
        assert said is not None
        for descriptor in (said.process, said.record, said.witness):
            assert descriptor is not None
            stack.callback(os.close, descriptor)
        names = {connection.fileno(): "mpi", line.fileno(): "line", said.witness: "witness"}
        events = stack.enter_context(select.epoll())  # epoll reports the events in their order
        for descriptor in names:
            events.register(descriptor, select.EPOLLIN)
        assert events.poll(0) == []
        rank.kill()
        rank.wait()
        assert [names[descriptor] for descriptor, _ in events.poll()] == ["witness", "line", "mpi"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")
def test_without_a_loopback_interface_there_is_none() -> None:
    script = "from mpitrain.watching.roll_call import connect_to_self; print(connect_to_self())"
    done = subprocess.run(["unshare", "-n", sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    before = time.monotonic()
    assert when_closed(None) >= before
