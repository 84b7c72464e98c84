"""How long `mpitrain run` takes to name the rank that is to blame for a hang: real hangs in real jobs.

    python benchmarks/hang_report.py                       # 20 of each kind, here: some 20 minutes
    python benchmarks/hang_report.py --repeat 2 --at-once 3
    python benchmarks/hang_report.py --bed NAME --repeat 2   # on a bed of nodes (`mpitrain testbed`)

A rank is stopped, loops, sleeps, sits in the kernel, or makes another call, after a random number of steps; with --bed
a node is frozen or its cable is cut, too. Counted is the time from then until the launcher prints a report; it is right
if it names that rank and what it does. The limit, stall_seconds, is the default of 10 s.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GOAL_SECONDS = 12.0
GIVE_UP_SECONDS = 60.0

SCRIPT = """
import os, signal, sys, time
import numpy
import mpitrain as mt
world = mt.init()
kind, guilty, last, pipe = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
def load():
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while kind == "loop":
        pass
    if kind == "sleep":
        time.sleep(1000)
    if kind == "kernel":
        os.mkfifo(pipe)
        opens = [(os.POSIX_SPAWN_OPEN, 9, pipe, os.O_RDONLY, 0)]
        os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=opens)
    if kind == "mismatch":
        world.receive(source=(guilty + 1) % world.size)
for step in range(10**9):
    if step == last and world.rank == guilty:
        print("HANGS", time.time(), flush=True)
        load()
    world.mean(numpy.ones(10_000))
    time.sleep(0.01)
"""

SAYS = {
    "stop": r"is stopped",
    "loop": r"runs in script\.py:\d+ \(load\)",
    "sleep": r"sleeps in script\.py:\d+ \(load\)",
    "kernel": r"is stuck in the kernel",
    "mismatch": r"waits in receive from rank",
    "freeze": r"nothing has been heard from it",
    "cut": r"nothing has been heard from it",
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=2, help="jobs at one time, on this machine")
    parser.add_argument("--kinds", nargs="*", choices=SAYS, default=None)
    parser.add_argument("--bed", metavar="NAME")
    arguments = parser.parse_args()
    here = [kind for kind in SAYS if kind not in ("freeze", "cut")]
    kinds = arguments.kinds or (["freeze", "cut"] if arguments.bed else here)
    print(f"{arguments.ranks} ranks, {os.cpu_count()} cores, stall_seconds 10; seconds from the hang to the report")
    print("| kind | named in time | median | largest |\n| --- | --- | --- | --- |")
    for kind in kinds:
        if arguments.bed:
            reported = [on_bed(arguments.bed, kind) for _ in range(arguments.repeat)]
        else:
            with ThreadPoolExecutor(arguments.at_once) as pool:
                reported = list(
                    pool.map(lambda _, kind=kind: on_this_machine(kind, arguments.ranks), range(arguments.repeat))
                )
        right = [seconds for seconds in reported if seconds is not None]
        in_time = sum(seconds <= GOAL_SECONDS for seconds in right)
        shown = f"{statistics.median(right):.1f} | {max(right):.1f}" if right else "- | -"
        print(f"| {kind} | {in_time} of {len(reported)} | {shown} |", flush=True)


def on_this_machine(kind: str, ranks: int) -> float | None:
    """Seconds until the report; None where it did not come, or named another rank."""
    guilty, last = random.randrange(ranks), random.randrange(1, 200)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "mpitrain", "run", "--hosts", "localhost", "-n", str(ranks), str(script)]
        process = subprocess.Popen(
            [*command, kind, str(guilty), str(last), f"{folder}/pipe"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        alarm = threading.Timer(GIVE_UP_SECONDS, process.send_signal, [signal.SIGTERM])
        alarm.start()
        try:
            return watch(process, rf"rank {guilty} on \S+ {SAYS[kind]}")
        finally:
            alarm.cancel()
            process.send_signal(signal.SIGTERM)
            process.communicate()


def watch(process: subprocess.Popen[str], expected: str, begun: float | None = None) -> float | None:
    """Read what a job prints until its first report; seconds from its hang, or from `begun` (time.time())."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"HANGS ([0-9.]+)", line):
            begun = float(match[1])
        if "no progress for" in line:
            return time.time() - begun if begun and re.search(expected, line) else None
    return None


def on_bed(name: str, kind: str) -> float | None:
    """Do the same on the bed's nodes, for a fault of a node."""
    from mpitrain.testbed import find

    bed = find(name)
    share = "/home/cluster/nfs"
    where = ["env", "-i", "PATH=/usr/local/lib/mpitrain/bin:/usr/bin:/bin", "HOME=/home/cluster", "UCX_TLS=tcp,self"]
    guilty = random.randrange(1, len(bed.names))
    bed.node_run("node1", ["bash", "-c", f"cat > {share}/script.py << 'END'\n{SCRIPT}\nEND"])
    command = f"cd {share}; exec venv/bin/python -m mpitrain run -n {len(bed.names)} script.py none 0 -1 -"
    output = Path(tempfile.mkdtemp()) / "output"
    line = f"{command} > /tmp/hang-report.output 2>&1"
    runner = threading.Thread(
        target=bed.node_run,
        args=("node1", ["runuser", "-u", "cluster", "--", *where, "bash", "-c", line]),
        kwargs={"timeout_seconds": 120.0},
    )
    runner.start()
    time.sleep(12.0 + random.random())
    begun = time.time()
    (bed.freeze if kind == "freeze" else bed.cut)(bed.names[guilty])
    seconds = None
    while time.time() - begun < GIVE_UP_SECONDS and seconds is None:
        time.sleep(0.1)
        output.write_text(bed.node_run("node1", ["cat", "/tmp/hang-report.output"]).stdout)
        for said in output.read_text().splitlines():
            if "no progress for" in said:
                named = re.search(rf"rank {guilty} on {bed.names[guilty]}: {SAYS[kind]}", said)
                seconds = time.time() - begun if named else float("inf")
    runner.join()
    bed.heal(bed.names[guilty])
    return seconds if seconds != float("inf") else None


if __name__ == "__main__":
    main()
