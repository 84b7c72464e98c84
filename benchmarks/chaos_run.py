"""A long training under `scripts/testbed chaos`: what is kept of its throughput, and whether its losses stay the same.

    scripts/testbed up 4 && scripts/testbed run ansible-playbook cluster/setup.yml
    python benchmarks/chaos_run.py BED [--minutes 60] [--options="--max-restarts 500 --nnodes 2:4"]

As root. The job has two ranks on each node of the bed, and steps of 50 ms. A rank is killed, a cable cut, a node
switched off, a rank or a node frozen, the disk of the checkpoints filled: every fault at a random moment of its period.
Then the same script trains alone, on one node and without a wait in its steps, for as many steps. The two loss curves
are compared step by step. The report and the picture of chaos are in the folder of --report.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from pathlib import Path

from testbed import Bed, find

REPOSITORY = Path(__file__).parents[1]
SHARE = "/home/cluster/nfs"
SMALL = "/srv/small"  # a small disk on the first node, for the checkpoints
ENVIRONMENT = ("PATH=/usr/local/lib/mpitrain/bin:/usr/bin:/bin", "HOME=/home/cluster", "UCX_TLS=tcp,self")

SCRIPT = """
import pathlib, sys, time
import numpy
import mpitrain as mt

folder, seconds, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
world = mt.init()

def regression(parameters, batch, on_gradient):
    x, y = batch
    time.sleep(seconds)
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    random = numpy.random.default_rng(0)
    data = mt.data.ArrayData(world, (random.standard_normal((6000, 50)), random.standard_normal(6000)), global_batch=48)
    adapter = mt.ArrayFunction(regression, {"w": numpy.zeros(50)}, mt.optim.SGD(1e-4, momentum=0.9))
    return mt.Parts(adapter, mt.Sync(), data)

class Enough(mt.Hook):
    def after_step(self, trainer, step):
        trainer.report({"enough": float(world.is_root and pathlib.Path(folder, "enough").exists())})

hooks = [Enough(), mt.StopWhen("enough", at_least=1.0), mt.StopAtStep(steps)]
hooks += [mt.Record([mt.writers.JsonLines(folder)], steps=1, meters=[mt.meters.Loss()])]
if seconds:
    hooks.append(mt.Checkpoint("SMALL/checkpoints", steps=200))
mt.Trainer(build, hooks).run()
""".replace("SMALL", SMALL)


def as_user(bed: Bed, line: str, timeout_seconds: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Run a line of shell on node1 as the shared user, in the share."""
    shell = ["env", "-i", "-C", "/", *ENVIRONMENT, "bash", "-c", f"cd {SHARE}; {line}"]
    return bed.node_run("node1", ["runuser", "-u", "cluster", "--", *shell], timeout_seconds=timeout_seconds)


def losses(bed: Bed, folder: str) -> dict[int, float]:
    """The loss of every step in a record; of a step that was made twice, the last one."""
    rows = [json.loads(line) for line in as_user(bed, f"cat {folder}/metrics.jsonl").stdout.splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def main() -> None:
    """Run both, and print how they compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bed")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=30.0)
    parser.add_argument("--python", default="venv/bin/python", help="on the share; decides the MPI library")
    parser.add_argument("--options", default="--max-restarts 500 --nnodes 2:4")
    parser.add_argument("--faults", default="rank,host,link,freeze,disk")
    parser.add_argument("--report", type=Path, default=Path("chaos-run"))
    arguments = parser.parse_args()
    bed = find(arguments.bed)
    count = int(60 * arguments.minutes / arguments.every)
    for node in bed.names:
        mount = f"mount -t tmpfs -o size=64m tmpfs {SMALL}; " if node == "node1" else ""
        line = f"rm -rf {SMALL}/*; mkdir -p {SMALL}; {mount}chown cluster {SMALL}"
        bed.node_run(node, ["bash", "-c", line], timeout_seconds=60)
    as_user(bed, f"rm -rf chaos; mkdir -p chaos/under chaos/alone; cat > chaos_train.py <<'END'\n{SCRIPT}\nEND")
    job = f"{arguments.python} -m mpitrain run --ppn 2 {arguments.options} chaos_train.py chaos/under 0.05 10000000"
    as_user(bed, f"MPITRAIN_MEMORY_STEPS=5 {job} < /dev/null > chaos/output 2> chaos/errors & echo $! > chaos/pid")
    token = ""
    while not token:
        time.sleep(1)
        listed = as_user(bed, "mpitrain ps --hosts node1").stdout
        token = "".join(re.findall(r"^([0-9a-f]{8}) .*trains.*chaos_train\.py", listed, re.M)[:1])
    time.sleep(20)  # for the rate of an undisturbed job
    command = [f"{REPOSITORY}/scripts/testbed", "chaos", token, "--bed", bed.name, "--every", f"{arguments.every:g}s"]
    command += ["--faults", arguments.faults, "--seed", "1", "--count", str(count), "--report", str(arguments.report)]
    if "disk" in arguments.faults:
        command += ["--disk", SMALL]
    chaos = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    time.sleep(arguments.every * (count + 1))
    as_user(bed, "touch chaos/under/enough")
    code = chaos.wait(300)
    under = losses(bed, "chaos/under")
    last = max(under)
    alone = as_user(bed, f"venv/bin/python chaos_train.py chaos/alone 0 {last} > /dev/null", 1200)
    assert alone.returncode == 0, alone.stderr
    expected = losses(bed, "chaos/alone")
    missing = [step for step in range(1, last + 1) if step not in under]
    apart = max(abs(under[step] - expected[step]) / abs(expected[step]) for step in under)
    print(f"exit code of chaos: {code}; {last} steps, missing in the record: {missing[:10] or 'none'}")
    print(f"largest relative difference of a loss from that of the undisturbed training: {apart:.1e}")


if __name__ == "__main__":
    main()
