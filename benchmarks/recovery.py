"""How long a training stands still when ranks are killed: `--recover` beside a restart from the newest checkpoint.

    python benchmarks/recovery.py [--trials 50] [--kills 1] [--ranks 8]            on this machine
    python benchmarks/recovery.py --bed NAME --python venv/bin/python ...          on the nodes of a test bed

Needs Open MPI 5 in the environment that runs the ranks. On a bed, which the playbooks have set up, the ranks are dealt
out over all nodes; run it as root. Each trial is a job. At a random moment, `--kills` of its ranks get SIGKILL, all at
once or `--apart` seconds one after the other. A trial counts if the job ends with 0, all ranks that are left have the
same bits, and all samples of every step are used exactly once. Every fifth trial (`--restart-every`) is one of
`--restarts` with a checkpoint every 20 steps in place of `--recover`.

The time is from the first kill to the end of the first step after the last loss, on the slowest rank. Printed are
median, lowest and highest, and the ratios to a step and to a restart.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mpitrain.testbed import Bed, find

SHARE = "/home/cluster/nfs"
DEADLINE_SECONDS = 120.0
ENVIRONMENT = ("PATH=/usr/local/lib/mpitrain/bin:/usr/bin:/bin", "HOME=/home/cluster")

SCRIPT = """
import hashlib, json, os, pathlib, sys, time
import numpy
import mpitrain as mt

folder, steps, seconds, is_restarted = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
world = mt.init()
me = world.rank
made, used = [], []

def regression(parameters, batch, on_gradient):
    x, y, number = batch
    used.append(number.tolist())
    time.sleep(seconds)
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    random = numpy.random.default_rng(0)
    arrays = random.standard_normal((600, 1000)), random.standard_normal(600), numpy.arange(600)
    data = mt.ArrayData(world, arrays, global_batch=48, shuffle=False)
    return mt.Parts(mt.ArrayFunction(regression, {"w": numpy.zeros(1000)}, mt.Sgd(1e-5)), mt.Sync(), data)

class Stamps(mt.Hook):
    def after_step(self, trainer, step):
        made.append((step.number, time.time(), trainer.world.generation, used[-1]))
        if step.number == 5:
            (folder / f"pid{me}").write_text(f"{os.uname().nodename} {os.getpid()}")

saves = [mt.Checkpoint(folder / "checkpoints", steps=20)] if is_restarted else []
trainer = mt.Trainer(build, [mt.StopAtStep(steps), Stamps(), *saves])
trainer.run()
bits = hashlib.sha256(trainer.adapter.parameters()["w"].tobytes()).hexdigest()
(folder / f"end{me}.json").write_text(json.dumps({"bits": bits, "made": made, "began": steps}))
"""


class Machine:
    """Where jobs run: this machine, or the nodes of a bed, where the shared user starts them on the first."""

    def __init__(self, bed: Bed | None, python: str, ranks: int) -> None:
        self._bed = bed
        self._run = f"{python} -m mpitrain run -n {ranks}"

    def shell(self, line: str, host: str = "node1", user: str = "cluster") -> tuple[int, str]:
        """Exit code and output of a line of shell."""
        if self._bed is None:
            done = subprocess.run(
                ["bash", "-c", line], check=False, capture_output=True, text=True, timeout=DEADLINE_SECONDS
            )
            return done.returncode, done.stdout + done.stderr
        shell = ["env", "-i", "-C", SHARE, *ENVIRONMENT, "bash", "-c", line]
        command = ["runuser", "-u", user, "--", *shell] if user != "root" else shell
        done = self._bed.node_run(host, command, timeout_seconds=DEADLINE_SECONDS)
        return done.returncode, done.stdout + done.stderr

    def job(self, folder: str, options: str, arguments: str) -> tuple[int, str]:
        """Run a job to its end."""
        return self.shell(f"{self._run} {options} {folder}/train.py {folder} {arguments}")


@dataclass
class Trial:
    """One job."""

    is_right: bool
    gap_seconds: float
    step_seconds: float
    words: str


def trial(machine: Machine, options: argparse.Namespace, *, is_restarted: bool) -> Trial:
    """Run a job, kill ranks of it, and see how it has ended."""
    folder = machine.shell("mktemp -d -p .")[1].strip()
    machine.shell(f"cat > {folder}/train.py <<'END'\n{SCRIPT}\nEND")
    steps = options.steps
    way = "--restarts 9" if is_restarted else "--recover"
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(machine.job, folder, way, f"{steps} {options.seconds} {int(is_restarted)}")
        processes: dict[int, tuple[str, int]] = {}
        while len(processes) < options.ranks and not ended.done():
            time.sleep(0.2)
            lines = machine.shell(f"cd {folder}; grep -H . pid* 2>/dev/null")[1].splitlines()
            found = [re.fullmatch(r"pid(\d+):(\S+) (\d+)", line) for line in lines]
            processes = {int(match[1]): (match[2], int(match[3])) for match in found if match}
        time.sleep(random.uniform(0.1, 0.6) * steps * options.seconds)
        killed = random.sample(sorted(processes), options.kills)
        began = time.time()
        for rank in killed:
            host, pid = processes[rank]
            machine.shell(f"kill -9 {pid}", host=host, user="root")
            time.sleep(options.apart)
        code, output = ended.result()
    texts = machine.shell(f"cd {folder}; cat end*.json; rm -rf ../{folder}")[1]
    ends = [json.loads(text) for text in texts.replace("}{", "}\n{").splitlines() if text.startswith("{")]
    expected = options.ranks if is_restarted else options.ranks - options.kills
    if code or len(ends) != expected or len({end["bits"] for end in ends}) != 1:
        return Trial(False, 0.0, 0.0, f"code {code}, {len(ends)} ranks ended, killed {killed}\n{output[-2000:]}")
    return judged(ends, steps, began, is_restarted=is_restarted)


def judged(ends: list[dict[str, Any]], steps: int, began: float, *, is_restarted: bool) -> Trial:
    """Whether every step of the last World has all its samples once, and how long no step ended."""
    made = [[tuple(step[:3]) + (tuple(step[3]),) for step in end["made"]] for end in ends]
    newest = max(generation for steps_of in made for _, _, generation, _ in steps_of)
    first_ends, right = [], True
    for steps_of in made:
        after = [at for _, at, generation, _ in steps_of if at > began and (is_restarted or generation == newest)]
        first_ends.append(min(after))
        numbers = [number for number, *_ in steps_of]
        right = right and numbers[-1] == steps and (is_restarted or numbers == list(range(1, steps + 1)))
    parts = [{number: part for number, _, generation, part in one if generation == newest} for one in made]
    for number in set.intersection(*(set(part) for part in parts)):
        samples = sorted(sample for part in parts for sample in part[number])
        right = right and len(samples) == len(set(samples)) and len(samples) in (48, 600 % 48)
    lengths = [b - a for one in made for (_, a, *_), (_, b, *_) in pairwise(one)]
    return Trial(right, max(first_ends) - began, statistics.median(lengths), "" if right else "samples or steps differ")


def main() -> None:
    """Run the trials, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--apart", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=0.02, help="that the computation of a step takes")
    parser.add_argument("--restart-every", type=int, default=5, help="0: never")
    options = parser.parse_args()
    machine = Machine(find(options.bed) if options.bed else None, options.python, options.ranks)
    trials: dict[bool, list[Trial]] = {False: [], True: []}
    while len(trials[False]) < options.trials:
        is_restarted = bool(options.restart_every) and len(trials[True]) * options.restart_every < len(trials[False])
        one = trial(machine, options, is_restarted=is_restarted)
        trials[is_restarted].append(one)
        print(f"{'restart' if is_restarted else 'recover'} {one.gap_seconds:.3f} s {one.words}", flush=True)
    for is_restarted, name in ((False, "--recover"), (True, "--restarts")):
        right = [one for one in trials[is_restarted] if one.is_right]
        if not right:
            continue
        gaps, step = [one.gap_seconds for one in right], statistics.median(one.step_seconds for one in right)
        middle = statistics.median(gaps)
        spread = (
            f"median {middle:.3f} s ({min(gaps):.3f} to {max(gaps):.3f}), {middle / step:.1f} steps of {step:.3f} s"
        )
        print(f"{name}: {len(right)} of {len(trials[is_restarted])} went on; kill to next step: {spread}")
    both = [[one.gap_seconds for one in trials[kind] if one.is_right] for kind in (False, True)]
    if all(both):
        print(f"ratio to a restart: {statistics.median(both[0]) / statistics.median(both[1]):.3f}")


if __name__ == "__main__":
    main()
