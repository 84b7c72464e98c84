"""The kill table: what a training over several hosts does about each fault, and what it leaves.

    scripts/testbed up 4 && scripts/testbed run ansible-playbook cluster/setup.yml
    python benchmarks/kill_table.py [--times 10] [--kinds rank,power] [--mpi openmpi] [--options="--max-restarts 0"]

As root. Each time a job trains on all nodes of the bed, two ranks on each, with the mpitrain of this checkout. Open MPI
is that of .venv-openmpi, which scripts/test makes. Then one thing, drawn by lot, is hit (kill_table_faults.py).

It counts as right if the job names what was hit, blames no rank that is not to blame, and trains on; with
`--max-restarts 0` it must end, and with `--recover` a killed rank starts no other attempt. The losses are equal if each
one has the bits of a training that nothing has disturbed, on one rank: parameters are rounded to a grid, so that the
number of ranks does not change them. Left is what a node has 60 s after the end and had not before: processes of the
shared user, and entries of /tmp and /dev/shm. Of a host that stays cut off, this is looked at while it still is, but
for what holds memory. A job whose ranks have not started within 150 s is repeated twice at most, and counted apart.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kill_table_faults import FAULTS, NODES, Fault, Rank
from testbed import Bed, find

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests/cluster")]
from launching import PYTHONS, SHARE, install_open_mpi  # noqa: E402

RANKS_PER_NODE = 2
GONE_SECONDS = 60.0
ALONE_SECONDS = 60.0  # an agent that is cut off ends after 30 s
JOB_SECONDS = 400.0
START_SECONDS = 150.0
SURVIVED_SECONDS = 150.0
STEPS_AFTER = 60  # which a job must make after a fault
MOST_STEPS = 10_000
MOST_REPEATS = 2  # of a job that has not started
SMALL = "/srv/small"  # a small disk of the first node, for checkpoints

# Rounding undoes what the order of a sum of the ranks has changed. Rank 0 writes each loss of all data, with all bits.
SCRIPT = """
import os, pathlib, socket, sys, time
import numpy
import mpitrain as mt

folder, seconds, steps, checkpoints = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
world = mt.init()
print("process of rank", world.rank, socket.gethostname(), os.getpid(), os.getppid(), flush=True)
random = numpy.random.default_rng(0)
X, Y = random.integers(-3, 4, (4800, 20)).astype(float), random.integers(-9, 10, 4800).astype(float)
loss = [0.0]
grown = []

def regression(parameters, batch, on_gradient):
    x, y = batch
    w = parameters["w"]
    w[:] = numpy.rint(w * 2**20) / 2**20
    if world.is_root:
        loss[0] = float(((X @ w - Y) ** 2).mean())
    time.sleep(seconds)
    error = x @ w - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    data = mt.data.ArrayData(world, (X, Y), global_batch=48)
    return mt.Parts(mt.ArrayFunction(regression, {"w": numpy.zeros(20)}, mt.optim.SGD(2**-8)), mt.Sync(), data)

class Show(mt.Hook):
    def after_step(self, trainer, step):
        if trainer.world.is_root:
            with open(folder / "losses", "a") as file:
                print(step.number, loss[0].hex(), file=file)
        if (folder / f"grow-{trainer.world.rank}").exists():
            grown.append(numpy.ones(1 << 24))
        trainer.report({"enough": float(trainer.world.is_root and (folder / "enough").exists())})

hooks = [Show(), mt.StopWhen("enough", at_least=1.0), mt.StopAtStep(steps)]
if checkpoints:
    hooks.append(mt.Checkpoint(checkpoints, steps=50))
mt.Trainer(build, hooks).run()
"""
# All nodes have one kernel here, in which UCX would take them for one machine with shared memory.
ENVIRONMENT = "PATH=/usr/local/lib/mpitrain/bin:/usr/bin:/bin HOME=/home/cluster UCX_TLS=tcp,self"
LEFT = """
for p in $(pgrep -u cluster); do tr '\\0\\n' '  ' < /proc/$p/cmdline 2>/dev/null | cut -c1-60; echo " $p"; done | \
grep -v -e systemd -e sd-pam -e sshd -e '^ *[0-9]*$'
find /tmp /dev/shm -mindepth 1 -maxdepth 1 -not -name 'kill-*' -not -name 'systemd-private-*'; true
"""


class NotStartedError(Exception):
    """The job has not started, as happens on a machine with too much load."""


@dataclass
class Outcome:
    """What became of a job after a fault.

    Attributes:
        wrong: what was not as it must be; empty if all was.
        are_equal: the losses have all bits of those of an undisturbed training.
        rest: what is left on the nodes.
        seconds: from the fault to the first new step after it; None: there was none.
        gone_seconds: from the end of the job until nothing was left.
        said: what the launcher has said.
    """

    wrong: list[str] = field(default_factory=list)
    are_equal: bool = True
    rest: list[str] = field(default_factory=list)
    seconds: float | None = None
    gone_seconds: float = 0.0
    said: str = ""


class Trial:
    """A job, and what is done to it.

    Attributes:
        bed: where it runs.
        ranks: where and in which process each rank runs.
        folder: of this job on the share.
    """

    def __init__(self, bed: Bed, python: str, fault: Fault, options: str) -> None:
        """Start the job, and wait until it trains."""
        self.bed, self.ranks = bed, dict[int, Rank]()
        self._python = python
        self._files = f"/tmp/kill-{uuid.uuid4().hex}"
        self.folder = f"{SHARE}/kill-{uuid.uuid4().hex[:8]}"
        self._code: int | None = None
        self.before = left(bed)
        self.on("node1", f"install -d -o cluster {self.folder}")
        fault.prepare(self)
        hosts = f"--hosts {','.join(NODES)} --ppn {RANKS_PER_NODE} {options}"
        program = f"kill.py {self.folder} 0.02 {MOST_STEPS} '{SMALL if fault.needs_disk else ''}'"
        self.launch(f"run {hosts} {program}", [f"MPITRAIN_MEMORY_STEPS=1 {fault.variables}"])
        until = time.monotonic() + START_SECONDS
        while len(self.processes()) < len(NODES) * RANKS_PER_NODE or self.num_steps() < STEPS_AFTER:
            if time.monotonic() > until or not self.is_running:
                self.kill_launcher("TERM")
                _, output = self.end()
                fault.undo(self)
                self.remove()
                raise NotStartedError(output)
            time.sleep(0.2)
        self.ranks = self.processes()

    def launch(self, arguments: str, variables: list[str]) -> None:
        """Start a command of mpitrain on node1, whose output follows that of those before."""
        line = f"cd {SHARE}; exec {self._python} -m mpitrain {arguments} >> {self._files}.output 2>&1"
        words = [*ENVIRONMENT.split(), *" ".join(variables).split()]
        setting = ["env", "-i", "-C", "/", *words, "bash", "-c", f"echo $$ > {self._files}.pid; {line}"]
        self._thread = threading.Thread(target=self._run, args=(["runuser", "-u", "cluster", "--", *setting],))
        self._thread.start()

    def _run(self, command: list[str]) -> None:
        self._code = self.bed.node_run("node1", command, timeout_seconds=JOB_SECONDS).returncode

    @property
    def is_running(self) -> bool:
        """True until the launcher has ended."""
        return self._thread.is_alive()

    def launcher(self) -> int:
        """The process of the launcher on node1."""
        return int(self.on("node1", f"cat {self._files}.pid"))

    def kill_launcher(self, name: str) -> None:
        """Send a signal to the launcher, if it is there."""
        self.on("node1", f"kill -{name} $(cat {self._files}.pid)")

    def output(self) -> str:
        """The job's output so far."""
        return self.on("node1", f"cat {self._files}.output")

    def processes(self) -> dict[int, Rank]:
        """The newest process of each rank."""
        found = re.findall(r"process of rank (\d+) (\S+) (\d+) (\d+)$", self.output(), re.M)
        return {int(rank): Rank(int(rank), host, int(pid), int(parent)) for rank, host, pid, parent in found}

    def losses(self) -> list[tuple[int, str]]:
        """The loss of each step that rank 0 has written, in the order of time."""
        rows = [line.split() for line in self.on("node1", f"cat {self.folder}/losses").splitlines()]
        return [(int(row[0]), row[1]) for row in rows if len(row) == 2]

    def num_steps(self) -> int:
        """The number of the last step."""
        return max((step for step, _ in self.losses()), default=0)

    def on(self, node: str, line: str) -> str:
        """The output of a line of shell on a node."""
        return self.bed.node_run(node, ["bash", "-c", line]).stdout

    def wait_for(self, pattern: str, seconds: float = SURVIVED_SECONDS) -> str:
        """Wait until the job has said that. Return what is missing; "" if nothing is."""
        until = time.monotonic() + seconds
        while not re.search(pattern, self.output(), re.M):
            if time.monotonic() > until or not self.is_running:
                return "" if re.search(pattern, self.output(), re.M) else f"not said: {pattern}"
            time.sleep(0.2)
        return ""

    def wait_for_steps(self, num_steps: int) -> bool:
        """Wait until the job has made so many steps beyond its present ones. False: it has not."""
        until, last = time.monotonic() + SURVIVED_SECONDS, self.num_steps() + num_steps
        while self.num_steps() < last and self.is_running and time.monotonic() < until:
            time.sleep(0.1)
        return self.num_steps() >= last

    def end(self) -> tuple[int, str]:
        """Let the job end, and wait for that: exit code and output."""
        self.on("node1", f"touch {self.folder}/enough")
        self._thread.join(JOB_SECONDS + 10)
        output = self.output()
        return -1 if self._code is None else self._code, output

    def remove(self) -> None:
        """Remove its files."""
        self.on("node1", f"rm -rf {self._files}.* {self.folder} {SMALL}/*")


def left(bed: Bed, *nodes: str) -> Counter[str]:
    """What the job has left on the nodes."""
    lines = [
        f"{node}: {re.sub(r' [0-9]+$', '', line)}"
        for node in nodes or NODES
        for line in bed.node_run(node, ["bash", "-c", LEFT]).stdout.splitlines()
    ]
    return Counter(lines)


def wait_until_gone(trial: Trial, seconds: float, *nodes: str, most: int = 0) -> tuple[list[str], float]:
    """Wait until the job has left at most so many things on the nodes. Return them, and how long that took."""
    began = time.monotonic()
    while sum((rest := left(trial.bed, *nodes) - trial.before).values()) > most:
        if time.monotonic() - began > seconds:
            return sorted(rest), seconds
        time.sleep(0.5)
    return [], time.monotonic() - began


def tried(bed: Bed, python: str, fault: Fault, options: str, expected: dict[int, str]) -> Outcome:
    """Run a job, hit it, and judge what becomes of it."""
    job, outcome = Trial(bed, python, fault, options), Outcome()
    survives = "--max-restarts 0" not in options or fault.is_harmless
    at, clock = job.num_steps(), time.monotonic()
    hit = fault.hit(job)
    if hit.pattern and (missing := job.wait_for(hit.pattern)):
        outcome.wrong.append(missing)
    if survives:
        if not hit.is_undone and not fault.is_harmless:  # the steps of an attempt that is about to end do not count
            job.wait_for("starting again on |the others continue without it|continued after|resumed from memory")
        at = job.num_steps()
        if not job.wait_for_steps(1):
            outcome.wrong.append("no step followed")
        outcome.seconds = time.monotonic() - clock
        if not job.wait_for_steps(STEPS_AFTER):
            outcome.wrong.append(f"only {job.num_steps() - at} steps followed")
    for host in hit.cut_off:
        rest, _ = wait_until_gone(job, ALONE_SECONDS, host, most=int(survives))
        outcome.wrong += [f"cut off, and left: {line}" for line in rest]
    code, output = job.end()
    said = [line for line in output.splitlines() if line.startswith("mpitrain: ")]
    outcome.said = f"{hit.what}: code {code}: {' | '.join(line for line in said if ':     ' not in line)}"
    if (code == 0) != survives:
        outcome.wrong.append(f"exit code {code}")
    blame = r"\branks? (\d+) on \S+ (?:was|were|ended|left|failed)"
    blamed = {rank for line in said for rank in re.findall(blame, line)}
    if blamed - {str(rank) for rank in hit.ranks}:
        outcome.wrong.append(f"blamed: {sorted(blamed)}")
    num_failed = len(re.findall(r"^mpitrain: attempt \d+ of \d+,?.* failed", output, re.M))
    if survives and num_failed != hit.num_failed and not ("--recover" in options and num_failed < hit.num_failed):
        outcome.wrong.append(f"{num_failed} attempts failed")
    odd = [step for step, loss in job.losses() if expected.get(step) != loss]
    outcome.are_equal = not odd
    fault.undo(job)
    for node in NODES:
        bed.heal(node)
    outcome.rest, outcome.gone_seconds = wait_until_gone(job, GONE_SECONDS)
    if outcome.wrong or outcome.rest or odd:
        print(output, *outcome.wrong, f"unequal from step {min(odd)}" if odd else "", sep="\n", file=sys.stderr)
    job.remove()
    return outcome


def started(bed: Bed, python: str, fault: Fault, options: str, expected: dict[int, str]) -> tuple[Outcome | None, int]:
    """What became of the first job that starts; and how many did not."""
    for failures in range(1 + MOST_REPEATS):
        try:
            outcome = tried(bed, python, fault, options, expected)
        except NotStartedError as error:
            print(f"not started: {error}", file=sys.stderr, flush=True)
            continue
        words = [f"WRONG {outcome.wrong}" if outcome.wrong else "right", "equal" if outcome.are_equal else "UNEQUAL"]
        words.append(f"left {outcome.rest}" if outcome.rest else f"nothing left after {outcome.gone_seconds:.0f} s")
        went_on = "" if outcome.seconds is None else f"went on after {outcome.seconds:.1f} s, "
        print(time.strftime("%H:%M:%S"), went_on, *words, outcome.said, file=sys.stderr, flush=True)
        return outcome, failures
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
        done = done if done.returncode else as_user(bed, line)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def undisturbed(bed: Bed, python: str) -> dict[int, str]:
    """The loss of each step of a training on one rank, without a wait and without a fault. The share keeps it."""
    folder = f"{SHARE}/kill-{hashlib.sha256(SCRIPT.encode()).hexdigest()[:8]}"
    train = f"mkdir {folder} && {python} kill.py {folder} 0 {MOST_STEPS} ''"
    done = as_user(bed, f"cd {SHARE}; [ -d {folder} ] || {{ {train}; }}; cat {folder}/losses")
    rows = [line.split() for line in done.stdout.splitlines() if re.fullmatch(r"\d+ \S+", line)]
    if len(rows) != MOST_STEPS:
        raise SystemExit(done.stdout[-2000:] + done.stderr)
    return {int(step): loss for step, loss in rows}


def as_user(bed: Bed, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell on node1 as the shared user."""
    words = ["runuser", "-u", "cluster", "--", "env", "-i", "-C", "/", *ENVIRONMENT.split(), "bash", "-c", line]
    return bed.node_run("node1", words, timeout_seconds=JOB_SECONDS)


def main() -> None:
    """Print a line a try, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--kinds", default=",".join(FAULTS))
    parser.add_argument("--mpi", choices=sorted(PYTHONS), default="mpich")
    parser.add_argument("--options", default="", help="of mpitrain run")
    parser.add_argument("--name", help="the test bed, where there are several")
    arguments = parser.parse_args()
    bed = find(arguments.name)
    if arguments.mpi == "openmpi" and not install_open_mpi(bed):
        parser.error("there is no .venv-openmpi of the nodes' version of Python; scripts/test makes it")
    install(bed)
    for node in NODES:  # all ranks must be able to write there; rank 0 is on the first node
        mount = f"mountpoint -q {SMALL} || mount -t tmpfs -o size=1m tmpfs {SMALL}; " if node == NODES[0] else ""
        bed.node_run(node, ["bash", "-c", f"mkdir -p {SMALL}; {mount}chown cluster {SMALL}"])
    expected = undisturbed(bed, PYTHONS[arguments.mpi])
    table = []
    for kind in arguments.kinds.split(","):
        tries = [
            started(bed, PYTHONS[arguments.mpi], FAULTS[kind], arguments.options, expected)
            for _ in range(arguments.times)
        ]
        ended = [outcome for outcome, _ in tries if outcome is not None]
        seconds = [outcome.seconds for outcome in ended if outcome.seconds is not None]
        cells = [sum(not outcome.wrong for outcome in ended), sum(outcome.are_equal for outcome in ended)]
        cells.append(sum(not outcome.rest for outcome in ended))
        went_on = f"{statistics.median(seconds):.1f} s" if seconds else ""
        shown = " | ".join(f"{cell} of {len(ended)}" for cell in cells)
        table.append(f"| {kind} | {shown} | {went_on} | {sum(failures for _, failures in tries)} |")
        print(table[-1], flush=True)
    heads = "| hit | right | losses equal | nothing left | went on after | not started |"
    print(heads, "| --- | --- | --- | --- | --- | --- |", *table, sep="\n")


if __name__ == "__main__":
    main()
