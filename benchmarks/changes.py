"""How long a training stands still when a host joins or leaves, and what the steps meanwhile cost.

    mpitrain testbed up 4 && mpitrain testbed run ansible-playbook cluster/setup.yml
    python benchmarks/changes.py [--times 10] [--mb 32] [--mpi openmpi] [--spares]

As root. A job trains on all nodes of the bed, two ranks on each, with the mpitrain of this checkout. Then the last node
leaves and joins, in turn, `--times` times each. Parameters and optimizer have `--mb` megabytes together.

Stall: from the end of the last step on the old hosts to the end of the first step on the new ones, without one step of
the new hosts. Meanwhile: the median step from the request to the change, as a ratio to the median step before it. At
the end, it is checked that no step was left out or made twice.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

from mpitrain.testbed import Bed, find

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests/cluster")]
from launching import PYTHONS, SHARE, install_open_mpi  # noqa: E402

from kill_table import install  # noqa: E402

RANKS_PER_NODE = 2
WAIT_SECONDS = 180.0
SETTLE_SECONDS = 4.0
ENVIRONMENT = (
    "PATH=/usr/local/lib/mpitrain/bin:/usr/bin:/bin HOME=/home/cluster UCX_TLS=tcp,self MPITRAIN_MEMORY_STEPS=5"
)

SCRIPT = """
import pathlib, sys, time
import numpy
import mpitrain as mt

world, size, folder = mt.init(), int(sys.argv[1]), pathlib.Path(sys.argv[2])

def model(parameters, batch, on_gradient):
    time.sleep(0.05)
    on_gradient("w", parameters["w"])
    return 0.0

class Stamps(mt.Hook):
    def after_step(self, trainer, step):
        if world.is_root:
            with open(folder / "stamps", "a") as file:
                print(step.number, world.size, time.time(), file=file)
        if world.broadcast(step.number % 10 == 0 and (folder / "enough").exists()):
            trainer.last_step = step.number

def build(world):
    data = mt.ArrayData(world, (numpy.zeros((960, 1)),), global_batch=96)
    function = mt.ArrayFunction(model, {"w": numpy.zeros(size, "float32")}, mt.Sgd(0.1, momentum=0.9))
    return mt.Parts(function, mt.Sync(), data)

mt.Trainer(build, [mt.StopAtStep(1_000_000), Stamps()]).run()
"""


class Training:
    """The job on the bed."""

    def __init__(self, bed: Bed, python: str, mb: int, options: str) -> None:
        self._bed, self._python, self._folder = bed, python, f"{SHARE}/changes"
        run = f"{python} -m mpitrain run --hosts {','.join(bed.names)} --ppn {RANKS_PER_NODE}"
        count = mb * (1 << 20) // 8  # float32, and as much for the momentum
        self.shell(f"rm -rf {self._folder}; mkdir {self._folder}; printf %s {shlex.quote(SCRIPT)} > changes.py")
        line = (
            f"{run} --restarts 3 {options} changes.py {count} {self._folder} > {self._folder}/output 2>&1 < /dev/null"
        )
        self.shell(f"({line}; echo code $? >> {self._folder}/output) > /dev/null 2>&1 &")

    def shell(self, line: str) -> str:
        """The output of a line of shell of the shared user on the first node."""
        setting = ["env", "-i", "-C", SHARE, *ENVIRONMENT.split(), "bash", "-c", line]
        return self._bed.node_run("node1", ["runuser", "-u", "cluster", "--", *setting], timeout_seconds=60).stdout

    def stamps(self) -> list[tuple[int, int, float]]:
        """Number, ranks and end of each step so far."""
        lines = self.shell(f"cat {self._folder}/stamps 2>/dev/null").splitlines()
        return [(int(step), int(size), float(at)) for step, size, at in (line.split() for line in lines)]

    def wait_for(self, size: int, steps: int) -> None:
        """Wait until that many of the last steps were made with `size` ranks."""
        until = time.monotonic() + WAIT_SECONDS
        while True:
            last = self.stamps()[-steps:]
            if len(last) == steps and all(ranks == size for _, ranks, _ in last):
                return
            if time.monotonic() > until:
                raise SystemExit(self.shell(f"tail -n 40 {self._folder}/output"))
            time.sleep(1)

    def change(self, command: str, host: str) -> float:
        """Ask for a change; return when."""
        at = time.time()
        job = f"$({self._python} -m mpitrain ps | awk '/changes.py/ {{ print $1 }}')"
        print(self.shell(f"{self._python} -m mpitrain {command} {job} --hosts {host} 2>&1").strip(), file=sys.stderr)
        return at

    def end(self) -> str:
        """End it after the present step. Return its output."""
        self.shell(f"touch {self._folder}/enough")
        until = time.monotonic() + WAIT_SECONDS
        while "\ncode " not in (output := self.shell(f"cat {self._folder}/output")) and time.monotonic() < until:
            time.sleep(1)
        return output


def measured(stamps: list[tuple[int, int, float]], asked: float) -> tuple[float, float]:
    """The stall in seconds, and how much longer the steps before it took."""
    at = next(k for k, (a, b) in enumerate(pairwise(stamps)) if b[2] > asked and a[1] != b[1])
    steps = [b[2] - a[2] for a, b in pairwise(stamps)]
    usual = statistics.median(steps[at + 20 : at + 60])
    before = [
        seconds for seconds, stamp in zip(steps, stamps, strict=False) if asked - SETTLE_SECONDS < stamp[2] < asked
    ]
    meanwhile = [seconds for seconds, stamp in zip(steps[:at], stamps, strict=False) if asked < stamp[2]]
    return steps[at] - usual, statistics.median(meanwhile) / statistics.median(before)


def main() -> None:
    """Print a line a change, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--mb", type=int, default=32)
    parser.add_argument("--mpi", choices=sorted(PYTHONS), default="mpich")
    parser.add_argument("--name", help="the test bed, where there are several")
    parser.add_argument("--spares", action="store_const", const="--spares", default="", help="the job has spares")
    options = parser.parse_args()
    bed, python = find(options.name), PYTHONS[options.mpi]
    if options.mpi == "openmpi":
        install_open_mpi(bed)
    install(bed)
    ranks, host = RANKS_PER_NODE * len(bed.names), bed.names[-1]
    training = Training(bed, python, options.mb, options.spares)
    training.wait_for(ranks, 100)
    results: dict[str, list[tuple[float, float]]] = {"leave": [], "join": []}
    for command in ("leave", "join") * options.times:
        asked = training.change(command, host)
        training.wait_for(ranks - RANKS_PER_NODE * (command == "leave"), 100)
        results[command].append(measured(training.stamps(), asked))
        print(
            f"{command}: {results[command][-1][0]:.2f} s, x{results[command][-1][1]:.2f}", file=sys.stderr, flush=True
        )
    output = training.end()
    steps = [step for step, _, _ in training.stamps()]
    if steps != list(range(1, len(steps) + 1)) or not re.search(r"^code 0$", output, re.M):
        raise SystemExit(f"steps are missing, or were made twice, or the job failed:\n{output[-4000:]}")
    job = f"{options.mpi} {options.spares}, {ranks} ranks on {len(bed.names)} nodes, {options.mb} MB of state"
    print(f"{REPOSITORY.name}, {job}")
    print("| | changes | stall: median, worst (s) | steps meanwhile: median, worst |\n| --- | --- | --- | --- |")
    for command, values in results.items():
        stalls, slower = zip(*values, strict=True)
        line = (
            f"{statistics.median(stalls):.2f}, {max(stalls):.2f} | {statistics.median(slower):.2f}, {max(slower):.2f}"
        )
        print(f"| {command} | {len(values)} | {line} |")


if __name__ == "__main__":
    main()
