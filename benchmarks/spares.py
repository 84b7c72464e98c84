"""How long a training stands still when a rank is killed: a restart with spares against one without.

    python benchmarks/spares.py [--trials 10] [--ranks 4] [--python .venv-openmpi/bin/python]

Each trial is a job on this machine, with and without spares in turn. Its last rank is killed after 50 steps, when its
spares are ready. The time is from the kill to the end of the first step after that, on the slowest rank.
Printed are median, lowest and highest, and the ratio of the medians; also the time from the start of the job to its
first step.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

DEADLINE_SECONDS = 300.0

# A step takes 20 ms, a checkpoint is written every 20 steps.
SCRIPT = """
import os, pathlib, sys, time
import numpy
import mpitrain as mt

folder = pathlib.Path(sys.argv[1])
world = mt.init()
stamps = open(folder / f"stamps{world.rank}", "a", buffering=1)

def regression(parameters, batch, on_gradient):
    x, y = batch
    time.sleep(0.02)
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    random = numpy.random.default_rng(0)
    data = mt.data.ArrayData(world, (random.standard_normal((600, 100)), random.standard_normal(600)), global_batch=48)
    return mt.Parts(mt.ArrayFunction(regression, {"w": numpy.zeros(100)}, mt.optim.SGD(1e-5)), mt.Sync(), data)

class Stamps(mt.Hook):
    def after_step(self, trainer, step):
        print(time.time(), os.getpid(), step.number, file=stamps)

trainer = mt.Trainer(build, [mt.StopAtStep(10**6), Stamps(), mt.Checkpoint(folder / "checkpoints", steps=20)])
trainer.run()
"""


def stamps(folder: Path, rank: int) -> list[tuple[float, int]]:
    """The steps that a rank has made: when each ended, and in which process."""
    path = folder / f"stamps{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(words[0]), int(words[1])) for line in lines if len(words := line.split()) == 3]


def wait_for(condition: object, job: subprocess.Popen[bytes]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():  # type: ignore[operator]
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the job has ended, or makes no steps")
        time.sleep(0.02)


def trial(python: str, ranks: int, *, has_spares: bool) -> tuple[float, float]:
    """Seconds from the start to the first step, and from the kill to the next one."""
    with tempfile.TemporaryDirectory() as name, Path(name, "output").open("wb") as output:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        options = ["--max-restarts", "1", *(["--spares"] if has_spares else [])]
        command = [python, "-m", "mpitrain", "run", "-n", str(ranks), *options, str(folder / "train.py"), name]
        began = time.time()
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            last = ranks - 1
            wait_for(lambda: len(stamps(folder, last)) > 50, job)
            if has_spares:
                wait_for(lambda: b" spares are ready" in Path(name, "output").read_bytes(), job)
            first, killed = stamps(folder, last)[0][0] - began, time.time()
            os.kill(stamps(folder, last)[-1][1], signal.SIGKILL)
            old = {pid for rank in range(ranks) for _, pid in stamps(folder, rank)}

            def after() -> list[float]:
                new = [[at for at, pid in stamps(folder, rank) if pid not in old] for rank in range(ranks)]
                return [steps[0] for steps in new if steps]

            wait_for(lambda: len(after()) == ranks, job)
            gap = max(after()) - killed
            return first, gap
        finally:
            job.terminate()
            job.wait(DEADLINE_SECONDS)


def show(name: str, seconds: Sequence[float]) -> None:
    """A line of the result."""
    print(f"{name:<36} {statistics.median(seconds):6.2f} s  [{min(seconds):.2f} to {max(seconds):.2f}]", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    print(
        f"{options.ranks} ranks, {options.trials} trials of each, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    results: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(options.trials):
        for has_spares in (False, True) if number % 2 else (True, False):
            results[has_spares].append(trial(options.python, options.ranks, has_spares=has_spares))
    for has_spares, name in ((False, "without spares"), (True, "with spares")):
        starts, gaps = zip(*results[has_spares], strict=True)
        show(f"{name}: start to first step", starts)
        show(f"{name}: kill to next step", gaps)
    medians = {kind: statistics.median(gap for _, gap in results[kind]) for kind in results}
    print(f"ratio of kill to next step: {medians[True] / medians[False]:.2f}")


if __name__ == "__main__":
    main()
