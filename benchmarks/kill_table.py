"""The kill table: of each process of a job over several hosts, whether its kill is blamed on it, and what it leaves.

    scripts/testbed up 4 && scripts/testbed run ansible-playbook cluster/setup.yml
    python benchmarks/kill_table.py [--times 10] [--kinds rank,power] [--mpi openmpi]

As root. Each time a job trains on all nodes of the bed, two ranks on each, with the mpitrain of this checkout. Open MPI
is that of .venv-openmpi, which scripts/test makes. Then one thing, drawn by lot, gets SIGKILL (`stop`: SIGSTOP), or a
node loses its power or its cable, or is frozen. It counts as right if the job names that, and blames no rank that is
not to blame. A job whose ranks have not started within 150 s says nothing about that: it is repeated twice at most, and
counted apart. Left is what a node has then and had not before: processes of the shared user, and entries of /tmp and
/dev/shm.
"""

from __future__ import annotations

import argparse
import random
import re
import shlex
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

from testbed import Bed, find

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests/cluster")]
from launching import PYTHONS, SHARE, install_open_mpi  # noqa: E402

RANKS_PER_NODE = 2
KINDS = ("rank", "mpiexec", "proxy", "guard", "launcher", "power", "cable", "freeze", "stop")
GONE_SECONDS = 90.0
JOB_SECONDS = 300.0
START_SECONDS = 150.0
MOST_REPEATS = 2  # of a job that has not started

SCRIPT = """
import os, socket
import numpy
import mpitrain as mt
world = mt.init()
print("process of rank", world.rank, socket.gethostname(), os.getpid(), os.getppid(), flush=True)
gradients = numpy.ones(100_000, numpy.float32)
while True:
    world.mean(gradients)
"""
# All nodes have one kernel here, in which UCX would take them for one machine with shared memory.
ENVIRONMENT = "PATH=/usr/local/lib/mpitrain/bin:/usr/bin:/bin HOME=/home/cluster UCX_TLS=tcp,self"
LEFT = """
for p in $(pgrep -u cluster); do tr '\\0' ' ' < /proc/$p/cmdline 2>/dev/null | cut -c1-60; echo; done | \
grep -v -e systemd -e sd-pam -e sshd -e '^ *$'
find /tmp /dev/shm -mindepth 1 -maxdepth 1 -not -name 'kill-*' -not -name 'systemd-private-*'; true
"""


class NotStartedError(Exception):
    """The job has not started, as happens on a machine with too much load."""


class Trial:
    """A job, and what is done to it."""

    def __init__(self, bed: Bed, python: str, kind: str) -> None:
        self._bed = bed
        self._files = f"/tmp/kill-{uuid.uuid4().hex}"
        self._code: int | None = None
        self.before = left(bed)
        hosts = f"--hosts {','.join(bed.names)} --ppn {RANKS_PER_NODE}"
        line = f"cd {SHARE}; exec {python} -m mpitrain run {hosts} kill.py > {self._files}.output 2>&1"
        variables = [*ENVIRONMENT.split(), *(["MPITRAIN_HANG_SECONDS=12"] if kind == "stop" else [])]
        setting = ["env", "-i", "-C", "/", *variables, "bash", "-c", f"echo $$ > {self._files}.pid; {line}"]
        self._thread = threading.Thread(target=self._run, args=(["runuser", "-u", "cluster", "--", *setting],))
        self._thread.start()
        self.ranks: dict[int, tuple[str, int, int]] = {}  # host, process and its parent
        until = time.monotonic() + START_SECONDS
        while len(self.ranks) < len(bed.names) * RANKS_PER_NODE:
            if time.monotonic() > until or not self._thread.is_alive():
                self.on("node1", f"kill -TERM $(cat {self._files}.pid)")
                raise NotStartedError(self.end()[1])
            time.sleep(0.2)
            found = re.findall(r"process of rank (\d+) (\S+) (\d+) (\d+)$", self.output(), re.M)
            self.ranks = {int(rank): (host, int(pid), int(parent)) for rank, host, pid, parent in found}
        time.sleep(random.uniform(0.1, 1.5))

    def _run(self, command: list[str]) -> None:
        self._code = self._bed.node_run("node1", command, timeout_seconds=JOB_SECONDS).returncode

    def output(self) -> str:
        """The job's output so far."""
        return self.on("node1", f"cat {self._files}.output")

    def on(self, node: str, line: str) -> str:
        """The output of a line of shell on a node."""
        return self._bed.node_run(node, ["bash", "-c", line]).stdout

    def hit(self, kind: str) -> tuple[str, str]:
        """Do it: what was hit, and a pattern of what is to be said of it."""
        rank = random.randrange(len(self.ranks))
        host, pid, parent = self.ranks[rank]
        launcher = self.on("node1", f"cat {self._files}.pid").strip()
        mpiexec = self.on("node1", f"pgrep -P {launcher} -x 'mpiexec|prterun|mpiexec.hydra'").strip()
        if kind in ("power", "cable", "freeze"):
            host = random.choice(self._bed.names[1:])
            {"power": self._bed.kill, "cable": self._bed.cut, "freeze": self._bed.freeze}[kind](host)
            return host, rf"^mpitrain: {host}: no message from this host since "
        if kind == "rank":
            pattern = rf"^mpitrain: rank {rank} on {host} (was killed by signal 9|ended without a message).*$"
        elif kind == "mpiexec":
            host, pid, pattern = "node1", int(mpiexec), "^mpitrain: mpiexec itself was killed on node1, by signal 9$"
        elif kind == "proxy":
            while str(parent) == mpiexec and host == "node1":  # Open MPI has no other one there
                host, pid, parent = self.ranks[random.randrange(len(self.ranks))]
            pid, pattern = parent, rf"^mpitrain: the process of mpiexec on {host} .*(was killed|has gone)"
        elif kind == "guard":
            host = random.choice(self._bed.names)
            pid = int(self.on(host, "pgrep -u cluster -f '^[^ ]*python[^ ]* -I -u -c .import json'").split()[0])
            pattern = rf"^mpitrain: {host}: the guard of the job there was killed"
        elif kind == "launcher":
            host, pid, pattern = "node1", int(launcher), ""
        else:
            pattern = rf"^mpitrain: nothing has moved for 12 s .*\brank {rank} on {host} is stopped"
        self.on(host, f"kill -{'STOP' if kind == 'stop' else 'KILL'} {pid}")
        return f"{kind} {rank if kind in ('rank', 'stop') else ''} on {host}", pattern

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit code and output."""
        self._thread.join(JOB_SECONDS + 10)
        output = self.output()
        self.on("node1", f"rm -f {self._files}.*")
        return -1 if self._code is None else self._code, output


def left(bed: Bed) -> Counter[str]:
    """What the job has left on the nodes."""
    lines = [
        f"{node}: {line}" for node in bed.names for line in bed.node_run(node, ["bash", "-c", LEFT]).stdout.splitlines()
    ]
    return Counter(lines)


def trial(bed: Bed, python: str, kind: str) -> tuple[bool, list[str], str]:
    """True if the job's message about the kill is right; what is left; and the message."""
    job = Trial(bed, python, kind)
    hit, pattern = job.hit(kind)
    code, output = job.end()
    said = [line for line in output.splitlines() if line.startswith("mpitrain: ")]
    blamed = [line for line in said if re.match(r"mpitrain: ranks? [\d,-]+ on \S+ (was|were|ended|left|failed)", line)]
    is_right = code != 0 and any(re.search(pattern, line) for line in said) if pattern else code == 137
    is_right = is_right and (len(blamed) == 1 if kind == "rank" else not blamed)
    for node in bed.names:
        bed.heal(node)
    until = time.monotonic() + GONE_SECONDS
    while (rest := left(bed) - job.before) and time.monotonic() < until:
        time.sleep(1)
    return is_right, sorted(rest), f"{hit}: code {code}: {' | '.join(line for line in said if ':     ' not in line)}"


def started(bed: Bed, python: str, kind: str) -> tuple[tuple[bool, bool] | None, int]:
    """Whether the words are right, and nothing is left, of the first job that starts; and how many did not."""
    for failures in range(1 + MOST_REPEATS):
        try:
            is_right, rest, said = trial(bed, python, kind)
        except NotStartedError as error:
            print(f"not started: {error}", file=sys.stderr)
            continue
        print("right" if is_right else "WRONG", f"left {rest}" if rest else "nothing left", said, file=sys.stderr)
        return (is_right, not rest), failures
    return None, 1 + MOST_REPEATS


def install(bed: Bed) -> None:
    """Put the mpitrain of this checkout, and the script, in the place of what the share has."""
    packages = f"{SHARE}/venv*/lib/python3*/site-packages/mpitrain"
    # Run this as the shared user, who alone may look into the share.
    unpack = f"for d in {packages}; do rm -rf $d; tar -xzf /tmp/kill-code -C ${{d%/*}}; done"
    there = f"cat > /tmp/kill-code && sudo -u cluster bash -ec {shlex.quote(unpack)} && rm /tmp/kill-code"
    pack = f"tar -C {REPOSITORY} --exclude __pycache__ -cz mpitrain | ssh admin@node1 {shlex.quote(there)}"
    done = bed.run(["bash", "-c", pack])
    write = f"printf %s {shlex.quote(SCRIPT)} > {SHARE}/kill.py"
    compiled = f"for v in {SHARE}/venv*; do $v/bin/python -m compileall -q $v/lib/python3*/site-packages/mpitrain; done"
    for line in (write, compiled):
        done = (
            bed.node_run("node1", ["runuser", "-u", "cluster", "--", "bash", "-c", line])
            if not done.returncode
            else done
        )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def main() -> None:
    """Print a line a try, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--mpi", choices=sorted(PYTHONS), default="mpich")
    parser.add_argument("--name", help="the test bed, where there are several")
    arguments = parser.parse_args()
    bed = find(arguments.name)
    if arguments.mpi == "openmpi" and not install_open_mpi(bed):
        parser.error("there is no .venv-openmpi of the nodes' version of Python; scripts/test makes it")
    install(bed)
    table = []
    for kind in arguments.kinds.split(","):
        starts = [started(bed, PYTHONS[arguments.mpi], kind) for _ in range(arguments.times)]
        tries = [result for result, _ in starts if result is not None]
        right, clean = sum(is_right for is_right, _ in tries), sum(is_clean for _, is_clean in tries)
        not_started = sum(failures for _, failures in starts)
        table.append(f"| {kind} | {right} of {len(tries)} | {clean} of {len(tries)} | {not_started} |")
    print("| killed | right culprit | nothing left | not started |", "| --- | --- | --- | --- |", *table, sep="\n")


if __name__ == "__main__":
    main()
