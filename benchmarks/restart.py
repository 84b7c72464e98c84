"""How long a training stands still when a rank or a node is lost: from the fault to the first step after the restart.

    python benchmarks/restart.py BED [--rounds 5] [--ppn 1] [--fault end]

BED is a test bed of several nodes that the playbooks have set up, with the mpitrain to be measured. `--fault`: a rank
of the last node is killed, or that node's cable is cut, or the node is frozen, or all logins and all processes of the
user end there (`end`), and the others see that at once. In turn the job goes on from the disk, from memory, and from
memory with spares, always with the hosts' facts asked before. Prints seconds (median, lowest, highest), in parts: until
the launcher says that the try has failed, and until a new step has been made; and the ratios of the latter to that from
the disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Sequence

from mpitrain.testbed import Bed, find

SHARE = "/home/cluster/nfs"
PYTHON = "venv/bin/python"
STAMPS = "import sys, time; [print(time.time(), line, end=str()) for line in sys.stdin]"
DEADLINE_SECONDS = 120.0
# All nodes have one kernel here, in which UCX would take them for one machine with shared memory.
ENVIRONMENT = ("PATH=/usr/local/lib/mpitrain/bin:/usr/bin:/bin", "HOME=/home/cluster", "UCX_TLS=tcp,self")

# By kind: variables, and options of `mpitrain run`. Without newer copies than that of the first step, it is the disk.
KINDS = {"from the disk": ("1000000", ""), "from memory": ("5", ""), "from memory, with spares": ("5", "--spares")}

# A step takes 50 ms, a checkpoint is written every 20.
SCRIPT = """
import os, pathlib, sys, time
import numpy
import mpitrain as mt

world = mt.init()
pathlib.Path("/tmp/rank").write_text(str(os.getpid()))

class Show(mt.Hook):
    def after_step(self, trainer, step):
        time.sleep(0.05)
        world.print("made step", step.number)

def regression(parameters, batch, on_gradient):
    x, y = batch
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / len(x))
    return float((error**2).mean())

def build(world):
    random = numpy.random.default_rng(0)
    data = mt.ArrayData(world, (random.standard_normal((60, 5)), random.standard_normal(60)), global_batch=12)
    return mt.Parts(mt.ArrayFunction(regression, {"w": numpy.zeros(5)}, mt.Sgd(0.01)), mt.Sync(), data)

mt.Trainer(build, [mt.StopAtStep(10**6), mt.Checkpoint("restart-checkpoints", steps=20), Show()]).run()
"""


def as_user(bed: Bed, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell on node1 as the shared user, in the share."""
    shell = ["env", "-i", "-C", "/", *ENVIRONMENT, "bash", "-c", f"cd {SHARE}; {line}"]
    return bed.node_run("node1", ["runuser", "-u", "cluster", "--", *shell], timeout_seconds=DEADLINE_SECONDS)


def output(bed: Bed) -> list[tuple[float, str]]:
    """The lines that the job has printed, each with its time."""
    lines = [line.partition(" ") for line in as_user(bed, "cat restart.output").stdout.splitlines()]
    return [(float(at), text) for at, _, text in lines]


def wait_for(bed: Bed, begin: str, after: float = 0.0) -> float:
    """Wait for the first line that begins so, printed later than `after`. Return the time of the line."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        lines = output(bed)
        for at, text in lines:
            if at > after and text.startswith(begin):
                return at
        if time.monotonic() > deadline:
            raise SystemExit(
                "\n".join([f"no {begin!r} within {DEADLINE_SECONDS:g} s", *(text for _, text in lines[-20:])])
            )
        time.sleep(0.5)


def strike(bed: Bed, fault: str) -> float:
    """Do it to the last node. Return the time before it."""
    node = bed.names[-1]
    at = time.time()
    if fault == "cable":
        bed.cut(node)
    elif fault == "freeze":
        bed.freeze(node)
    else:
        lines = {"rank": "kill -9 $(cat /tmp/rank)", "end": "pkill -9 -x sshd; pkill -9 -u cluster"}
        at = float(bed.node_run(node, ["bash", "-c", f"date +%s.%N; {lines[fault]}"]).stdout)
    return at


def mend(bed: Bed, fault: str) -> None:
    """Undo it. What is left of the job on that node ends by itself."""
    node = bed.names[-1]
    bed.heal(node)
    if fault == "end":
        bed.node_run(node, ["systemctl", "restart", "ssh"])
    if fault != "rank":
        time.sleep(20)


def one_round(bed: Bed, kind: str, ranks_per_node: int, fault: str) -> tuple[float, float]:
    """Seconds from the fault to the end of the job, and to the first step after that. (The nodes have one clock.)"""
    as_user(bed, f"rm -rf restart-checkpoints restart.output; cat > restart_train.py <<'END'\n{SCRIPT}\nEND")
    steps, options = KINDS[kind]
    job = f"{PYTHON} -m mpitrain run --ppn {ranks_per_node} --restarts 1 --min-nodes 1 {options} restart_train.py"
    run = f"echo $BASHPID > /tmp/restart.pid; MPITRAIN_MEMORY_STEPS={steps} exec {job}"
    as_user(bed, f"( {{ {run}; }} 2>&1 | {PYTHON} -uc '{STAMPS}' > restart.output ) < /dev/null > /dev/null 2>&1 &")
    try:
        if options:
            wait_for(bed, f"mpitrain: {ranks_per_node * len(bed.names)} spares are ready")
        wait_for(bed, "[0] made step 200")
        struck = strike(bed, fault)
        ended = wait_for(bed, "mpitrain: try 1 of 2 failed", struck)
        stepped = wait_for(bed, "[0] made step", ended)
        if any("resumed from memory" in text for _, text in output(bed)) != (kind != "from the disk"):
            raise SystemExit(f"the job did not go on {kind}")
        return ended - struck, stepped - struck
    finally:
        as_user(bed, "pid=$(cat /tmp/restart.pid); kill -TERM $pid; timeout 30 tail --pid=$pid -f /dev/null")
        mend(bed, fault)


def show(name: str, seconds: Sequence[float]) -> None:
    """A line of the result."""
    print(f"{name:<52} {statistics.median(seconds):6.2f} s  [{min(seconds):.2f} to {max(seconds):.2f}]", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ppn", type=int, default=1)
    parser.add_argument("--fault", choices=["rank", "end", "cable", "freeze"], default="rank")
    arguments = parser.parse_args()
    bed, rounds = find(arguments.bed), arguments.rounds
    cores, load = os.cpu_count(), os.getloadavg()[0]
    print(f"{arguments.fault}: {len(bed.names)} nodes, {arguments.ppn} ranks on each", end=", ")
    print(f"{rounds} rounds, {cores} cores, load {load:.1f}")
    measured: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, times in measured.items():
            times.append(one_round(bed, kind, arguments.ppn, arguments.fault))
    for kind, times in measured.items():
        ends, steps = zip(*times, strict=True)
        show(f"{kind}: until the job has ended", ends)
        show(f"{kind}: until a new step", steps)
    medians = {kind: statistics.median(step for _, step in times) for kind, times in measured.items()}
    print("; ".join(f"{kind}: {median / medians['from the disk']:.2f}" for kind, median in medians.items()))


if __name__ == "__main__":
    main()
