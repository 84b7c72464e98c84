"""A restart from memory beside one from the disk, and what the copies cost while nothing happens. Runs on this machine.

    python benchmarks/memory_copies.py [--rounds 5] [--ranks 4] [--mib 8] [--seconds 0.02]     kill -> next step
    python benchmarks/memory_copies.py --cost [--ranks 2] [--mib 95.4] [--seconds 0.072]       cost of the copies

First form: each round is a job from memory and one from the disk (a checkpoint every 20 steps, no copies), in turn. At
a random moment, a random rank gets SIGKILL. A round counts if the job ends with code 0 and with the bits of a job in
which nothing was killed. Printed: seconds from the kill to the end of the next step, and the steps made again.

Second form: one job for each of three settings, in turn: no copies, as many as the default makes, one after every
step. The state has `--mib`, and the computation of a step takes `--seconds`. Printed: the share of the time that rank 0
spends in copies and in the agreement on the next one, and the median of the steps. The computation sleeps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 300.0
NEVER = 10**9

SCRIPT = """
import json, os, pathlib, sys, time
import numpy
import mpitrain as mt
from mpitrain.training.state_copies import StateCopies

folder, steps, seconds, count, saves = sys.argv[1], *map(float, sys.argv[2:])
folder, count = pathlib.Path(folder), int(count)
world = mt.init()
copies, ends = [], []

def timed(self, trainer, original=StateCopies.after_step):
    began = time.perf_counter()
    wish = original(self, trainer)
    copies.append((time.perf_counter() - began, self.steps))
    return wish

StateCopies.after_step = timed

def function(parameters, batch, on_gradient):
    time.sleep(seconds)
    on_gradient("w", parameters["w"] * numpy.float32(0.001) + batch.mean(dtype=numpy.float32))
    return float(batch.mean())

def build(world):
    data = mt.ArrayData(world, numpy.arange(960, dtype=numpy.float32), global_batch=48)
    zeros = {"w": numpy.zeros(count, numpy.float32)}  # and as much again of momentum
    return mt.Parts(mt.ArrayFunction(function, zeros, mt.Sgd(1e-3, momentum=0.9)), mt.Sync(), data)

class Stamps(mt.Hook):
    def after_step(self, trainer, step):
        ends.append((step.number, time.time()))
        if step.number == 25:  # once, and behind the first checkpoint
            (folder / f"pid{world.rank}").write_text(str(os.getpid()))

hooks = [mt.StopAtStep(int(steps)), Stamps()]
if saves:
    hooks.append(mt.Checkpoint(folder / "checkpoints", steps=20))
trainer = mt.Trainer(build, hooks)
trainer.run()
if world.is_root:
    import hashlib
    bits = hashlib.sha256(trainer.adapter.parameters()["w"].tobytes()).hexdigest()
    (folder / "end.json").write_text(json.dumps({"bits": bits, "ends": ends, "copies": copies}))
"""


def start(folder: Path, options: argparse.Namespace, every: int, *, saves: bool) -> subprocess.Popen[str]:
    """Start a job that goes on after failures; copies `every` so many steps, 0: by default."""
    (folder / "train.py").write_text(SCRIPT)
    count = int(options.mib * 2**20 / 8)
    arguments = [folder, options.steps, options.seconds, count, int(saves)]
    command = [sys.executable, "-m", "mpitrain", "run", "-n", options.ranks, "--restarts", 9, folder / "train.py"]
    return subprocess.Popen(
        [str(word) for word in [*command, *arguments]],
        env={**os.environ, "MPITRAIN_MEMORY_STEPS": str(every), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(folder: Path, job: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """The results that the job prints at its end, and its output."""
    output, _ = job.communicate(timeout=DEADLINE_SECONDS)
    if job.returncode:
        raise SystemExit(f"the job ended with code {job.returncode}\n{output}")
    return json.loads((folder / "end.json").read_text()), output


def killed(options: argparse.Namespace, *, is_from_memory: bool) -> tuple[str, float, int]:
    """A job in which a rank is killed: its bits, seconds from the kill to the next step, and steps made again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = start(folder, options, 0 if is_from_memory else NEVER, saves=not is_from_memory)
        pids = [folder / f"pid{rank}" for rank in range(options.ranks)]
        while not all(path.exists() and path.read_text() for path in pids):
            if job.poll() is not None:
                finish(folder, job)
                raise SystemExit("the job ended before a rank could be killed")
            time.sleep(0.05)
        time.sleep(random.uniform(0.2, 0.6) * options.steps * options.seconds)
        at = time.time()
        os.kill(int(random.choice(pids).read_text()), signal.SIGKILL)
        end, output = finish(folder, job)
    failed = re.search(r"try 1 of 10 failed at step (\d+)", output)
    resumed = re.search(r"resumed from (memory )?.*at step (\d+)", output)
    if not failed or not resumed or bool(resumed[1]) != is_from_memory:
        raise SystemExit(f"the job did not go on as it should\n{output}")
    return end["bits"], end["ends"][0][1] - at, int(failed[1]) - 1 - int(resumed[2])


def restarts(options: argparse.Namespace) -> None:
    """Kill a rank in each job, and print the table."""
    with tempfile.TemporaryDirectory() as name:
        whole, _ = finish(Path(name), start(Path(name), options, NEVER, saves=False))
    table: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for number in range(options.rounds):
        for is_from_memory in (True, False) if number % 2 else (False, True):
            bits, seconds, again = killed(options, is_from_memory=is_from_memory)
            if bits != whole["bits"]:
                raise SystemExit("the parameters differ from those of the undisturbed job")
            table[is_from_memory].append((seconds, again))
            print(f"{'memory' if is_from_memory else 'disk'} {seconds:.2f} s, {again} steps again", flush=True)
    for is_from_memory, name in ((False, "disk"), (True, "memory")):
        seconds_of, again_of = zip(*table[is_from_memory], strict=True)
        middle = statistics.median(seconds_of)
        print(
            f"{name:<7} {len(seconds_of)} of {options.rounds} with the bits of the undisturbed job; kill to next step: "
            f"median {middle:.2f} s ({min(seconds_of):.2f} to {max(seconds_of):.2f}); steps made again: "
            f"median {statistics.median(again_of):g}, most {max(again_of)}"
        )
    ratios = [memory[0] / disk[0] for memory, disk in zip(table[True], table[False], strict=True)]
    print(f"memory / disk: median of the rounds {statistics.median(ratios):.2f}")


def cost(options: argparse.Namespace) -> None:
    """Run with and without copies, and print what they take."""
    for every, name in ((NEVER, "no copies"), (0, "default"), (1, "every step")) * options.rounds:
        with tempfile.TemporaryDirectory() as folder:
            end, _ = finish(Path(folder), start(Path(folder), options, every, saves=False))
        # Leave out the first steps, in which memory is made, and the last one, after which there is always a copy.
        times, kept = [at for _, at in end["ends"]][10:-1], end["copies"][10:-1]
        total, copying = times[-1] - times[0], sum(seconds for seconds, _ in kept[:-1])
        steps = sorted({steps for _, steps in kept if steps < NEVER})
        step = statistics.median(b - a for a, b in pairwise(times))
        slowest = max(seconds for seconds, _ in kept)
        print(
            f"{name:<10} {len(times) - 1} steps of {1e3 * total / (len(times) - 1):.1f} ms (median {1e3 * step:.1f}); "
            f"copies: {copying / total:.2%} of the time, the longest {1e3 * slowest:.1f} ms, every {steps} steps",
            flush=True,
        )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=float, default=8.0, help="of the state")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.02, help="that the computation of a step takes")
    options = parser.parse_args()
    (cost if options.cost else restarts)(options)


if __name__ == "__main__":
    main()
