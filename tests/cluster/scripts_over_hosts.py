"""Shared by the tests of jobs over the nodes of a bed: their scripts, and the hosts of their ranks."""

from __future__ import annotations

import pytest
from launching import SHARE, write

from testbed import Bed

SCRIPTS = {
    "hello.py": """
import mpitrain as mt, os, socket, sys, time
world = mt.init()
names = ("UCX_NET_DEVICES", "LEARNING_RATE", "_MPITRAIN_EXPECTED_SIZE")
values = [os.environ.get(name) for name in names]
print("rank", world.rank, "of", world.size, "on", socket.gethostname(), world.context.device(world.rank), *values)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
""",
    "plain.py": """
from mpi4py import MPI
import socket, sys
print("rank", MPI.COMM_WORLD.rank, "of", MPI.COMM_WORLD.allreduce(1), "on", socket.gethostname())
""",
    "fails_before_mpi.py": """
import socket
if socket.gethostname() != "node1":
    raise ImportError("no such library here")
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
""",
    "leaves_before_init.py": """
import socket, sys
import mpitrain as mt
if socket.gethostname() == "node3":
    sys.exit(3)
mt.init()
""",
    "late.py": """
import socket, time
import mpitrain as mt
if socket.gethostname() == "node3":
    time.sleep(1000)
mt.init()
""",
    "threads.py": """
import mpitrain as mt, os, socket
mt.init()
print(os.environ["OMP_NUM_THREADS"], "threads on", socket.gethostname())
""",
    "hangs.py": """
import os, signal, socket, subprocess, sys, time
import mpitrain as mt
world = mt.init()
def load():
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if sys.argv[1] == "die unseen":  # for two seconds its guard sees nothing, as on a host that is busy
        guard = subprocess.check_output(["pgrep", "-u", "cluster", "-f", "^[^ ]*python[^ ]* -I -u -c .import json"])
        line = f"kill -STOP {int(guard)}; touch {sys.argv[2]}; sleep 2; kill -CONT {int(guard)}"
        subprocess.Popen(["sh", "-c", line], env={"PATH": os.environ["PATH"]}, start_new_session=True)
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
        os.unlink(sys.argv[2])
    if sys.argv[1].startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    while sys.argv[1] == "loop":
        pass
    while sys.argv[1] == "sleep":
        time.sleep(1)
for number in range(10**9):
    if number == 20:
        print("stands still now")
        if socket.gethostname() == "node3":
            load()
    world.barrier()
    time.sleep(0.01)
""",
    "leaves_a_process.py": """
import socket, subprocess
import mpitrain as mt
world = mt.init()
if socket.gethostname() == "node2":
    null = subprocess.DEVNULL
    subprocess.Popen(["sleep", "1234"], start_new_session=True, stdin=null, stdout=null, stderr=null)
""",
}


@pytest.fixture(scope="module", autouse=True)
def scripts(bed: Bed) -> None:
    """Write the scripts to the share."""
    for name, text in SCRIPTS.items():
        write(bed, "node1", f"{SHARE}/{name}", text)


def hosts(output: str) -> dict[int, str]:
    """The host of every rank that has printed its line."""
    words = [line.partition("] ")[2].split() for line in output.splitlines() if "] rank " in line]
    return {int(line[1]): line[5] for line in words}
