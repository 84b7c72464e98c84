"""What watching a job costs a training step: what a rank publishes, and what guard and launcher use.

    python benchmarks/guard_overhead.py [--steps 400] [--ranks 2]

A step is 50 ms of computing and one exchange of gradients in 8 buckets. Three numbers, each a share of the step:

- ranks: the time in which a rank writes what it does, from the number of such writes a step and the time of each;
- watching: the processor time of the guard and the launcher while the job runs, as a share of one core;
- steps: medians with and without, where nothing is published, in blocks that alternate. A machine's noise is mostly
  larger than what is to be seen in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP_SECONDS = 0.05
BLOCK = 20

SCRIPT = """
import json, statistics, sys, time
import numpy
import mpitrain as mt
from mpitrain.watching import activity
from mpitrain.watching.rank_record import WAITS
world = mt.init()
steps, block, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
own = activity.own_activity()
counts = {"begin": 0, "count_call": 0, "count_moved": 0}
def counted(name):
    plain = getattr(own, name)
    def call(*arguments):
        counts[name] += 1
        return plain(*arguments)
    return call
parameters = {f"layer{number}": numpy.zeros(2**17, numpy.float32) for number in range(8)}
described = [mt.Parameter(name, value.shape, value.dtype) for name, value in parameters.items()]
reducer = mt.GradientReducer(world, described, bucket_bytes=2**19)
def step():
    begun = time.perf_counter()
    reducer.begin(1.0)
    for number in range(8):
        until = time.perf_counter() + seconds / 8
        while time.perf_counter() < until:
            pass
        reducer.ready(number, parameters[f"layer{number}"])
    reducer.finish(0.0)
    return time.perf_counter() - begun
for _ in range(10):
    step()
for name in counts:
    setattr(own, name, counted(name))
for _ in range(block):
    step()
for name in counts:
    delattr(own, name)
cost = {}
for name, arguments in (("begin", (WAITS, "mean", 0.0)), ("count_call", (1,)), ("count_moved", ())):
    begun = time.perf_counter()
    for _ in range(2000):
        result = getattr(own, name)(*arguments)
        if name == "begin":
            own.end(result)
    cost[name] = (time.perf_counter() - begun) / 2000
world.barrier()
print("MEASURE", flush=True)
times = {True: [], False: []}
for number in range(steps // block):
    is_on = number % 2 == 0
    activity._activity = own if is_on else None
    times[is_on] += [step() for _ in range(block)]
activity._activity = own
if world.is_root:
    per_step = sum(counts[name] / block * cost[name] for name in counts)
    print("RESULT", json.dumps({
        "counts": {name: count / block for name, count in counts.items()}, "cost": cost, "per_step": per_step,
        "on": statistics.median(times[True]), "off": statistics.median(times[False]),
        "spread": [statistics.quantiles(times[is_on], n=4)[0::2] for is_on in (True, False)],
    }), flush=True)
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        numbers = [str(arguments.steps), str(BLOCK), str(STEP_SECONDS)]
        command = [sys.executable, "-m", "mpitrain", "run", "--hosts", "localhost", "-n", str(arguments.ranks)]
        with subprocess.Popen([*command, str(script), *numbers], stdout=subprocess.PIPE, text=True) as process:
            result, used, wall = watch(process)
    used_share = {name: seconds / wall for name, seconds in used.items()}
    print(f"{arguments.ranks} ranks, {os.cpu_count()} cores, steps of {result['off'] * 1e3:.1f} ms")
    writes = ", ".join(
        f"{count:.0f} x {name} of {result['cost'][name] * 1e6:.2f} us" for name, count in result["counts"].items()
    )
    print(f"ranks: {result['per_step'] * 1e6:.1f} us a step = {result['per_step'] / STEP_SECONDS:.3%} ({writes})")
    shares = ", ".join(f"{name} {share:.2%}" for name, share in used_share.items())
    print(f"watching: {shares} of one core")
    (low, high), (low_off, high_off) = result["spread"]
    print(
        f"steps: median {result['on'] * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f}) with, "
        f"{result['off'] * 1e3:.2f} ms ({low_off * 1e3:.2f} to {high_off * 1e3:.2f}) without: "
        f"{result['on'] / result['off'] - 1:+.2%}"
    )


def watch(process: subprocess.Popen[str]) -> tuple[dict, dict[str, float], float]:
    """The job's measurements, the processor seconds of launcher and guard in that time, and the time itself."""
    assert process.stdout is not None
    pids: dict[str, int] = {}
    begun, before = 0.0, {}
    for line in process.stdout:
        if "MEASURE" in line and not begun:
            pids = {"launcher": process.pid, "guard": guard_of(process.pid)}
            begun, before = time.monotonic(), {name: processor_seconds(pid) for name, pid in pids.items()}
        if "RESULT" in line:
            used = {name: processor_seconds(pid) - before[name] for name, pid in pids.items()}
            wall = time.monotonic() - begun
            return json.loads(line.partition("RESULT ")[2]), used, wall
    raise SystemExit("the job has failed")


def guard_of(launcher: int) -> int:
    """The launcher's child that is no mpiexec."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if b"json.loads" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise SystemExit("there is no guard")


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
