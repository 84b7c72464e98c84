"""What those who watch a job cost it: the time of a step, and the processor time of launcher and guard.

    python benchmarks/live_watchers.py --ranks 1 --watchers 100 [--rounds 10] [--seconds 20]
    python benchmarks/live_watchers.py --ranks 16 --watchers 1 --rest 0.04

One job trains; in turns, nobody watches it, and so many do, each with a look a second. A step is a fixed amount of work
that takes 50 ms when the job begins, and with --rest a sleep in which the other ranks of a machine with few cores run.
All watchers are in one process, which needs a core of its own: their reading is not a cost of the job.
"""

from __future__ import annotations

import argparse
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy

from guard_overhead import guard_of, processor_seconds
from mpitrain.bench.rounds import ratio, spread, versions_line
from mpitrain.launch.live_jobs import LiveJob, LiveSource, find

STEP_SECONDS = 0.05
# What follows a change of the number of watchers does not count: guards are slow to forget.
SETTLE_SECONDS = 4.0

SCRIPT = """
import sys, time
import numpy
import mpitrain as mt

seconds, rest, path = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
matrix = numpy.random.default_rng(0).standard_normal((64, 64))

def work(times):
    for _ in range(times):
        matrix @ matrix

def loops():
    begun = time.perf_counter()
    work(2000)
    return 2000 * (seconds - rest) / (time.perf_counter() - begun)

def loss(parameters, batch, on_gradient):
    work(number)
    time.sleep(rest)
    on_gradient("w", parameters["w"])
    return 0.5

def build(world):
    global number
    number = int(world.mean(min(loops() for _ in range(5))))
    data = mt.ArrayData(world, (numpy.zeros((1024, 1)),), global_batch=world.size)
    return mt.Parts(mt.ArrayFunction(loss, {"w": numpy.zeros(2**17)}, mt.Sgd(0.1)), mt.Sync(), data)

class Times(mt.Hook):  # when each step ended, by time.monotonic(), and how long it took
    def before_run(self, trainer):
        self.file = open(path, "w") if trainer.world.is_root else None
    def after_step(self, trainer, step):
        if self.file:
            self.file.write(f"{time.monotonic()} {step.seconds}\\n")
            self.file.flush()

mt.Trainer(build, [mt.StopAtStep(10**9), Times()]).run()
"""


def main() -> None:
    """Run the job, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--watchers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds of a step in which a rank sleeps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script, times = Path(folder, "script.py"), Path(folder, "times")
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "mpitrain", "run", "--hosts", "localhost", "-n", str(arguments.ranks)]
        words = [str(script), str(STEP_SECONDS), str(arguments.rest), str(times)]
        with subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                job = job_of(process, times)
                turns = [turn(job, process.pid, count, arguments.seconds) for count in counts(arguments)]
            finally:
                process.terminate()
        ended, took = numpy.loadtxt(times).T
    print(versions_line())
    cores = len(os.sched_getaffinity(0))
    print(f"{arguments.ranks} ranks, {cores} cores, load {os.getloadavg()[0]:.1f}, {arguments.rounds} rounds")
    medians: dict[str, list[float]] = {}
    for count, begin, end, shares in turns:
        name = f"{count} watchers"
        steps = took[(ended > begin) & (ended <= end)]
        medians.setdefault(name, []).append(statistics.median(steps))
        for part, share in shares.items():
            medians.setdefault(f"{part}, {name}", []).append(share)
    for name, values in medians.items():
        middle, low, high = spread(values)
        if name.endswith(" watchers") and "," not in name:
            print(f"{name}: a step takes {middle * 1e3:.3f} ms ({low * 1e3:.3f} to {high * 1e3:.3f})")
        else:
            print(f"{name}: {middle:.2%} of a core ({low:.2%} to {high:.2%})")
    middle, low, high = ratio(medians, f"{arguments.watchers} watchers", "0 watchers")
    print(f"ratio of the rounds: {middle - 1:+.3%} ({low - 1:+.3%} to {high - 1:+.3%})")


def counts(arguments: argparse.Namespace) -> list[int]:
    """Return the number of watchers in each turn: every other round in reverse order."""
    orders = ([0, arguments.watchers], [arguments.watchers, 0])
    return [count for number in range(arguments.rounds) for count in orders[number % 2]]


def job_of(process: subprocess.Popen[bytes], times: Path) -> LiveJob:
    """Return the job when it has made some steps."""
    while process.poll() is None:
        if times.exists() and len(times.read_text().splitlines()) > 20:
            return next(job for job in find()[0] if job.path is not None and f"~{process.pid}~" in job.path.name)
        time.sleep(0.2)
    raise SystemExit("the job has failed")


def turn(job: LiveJob, launcher: int, count: int, seconds: float) -> tuple[int, float, float, dict[str, float]]:
    """Watch for so many seconds. Return the number, begin and end, and the processor time by process, in cores."""
    pids = {"launcher": launcher, "guard": guard_of(launcher)}
    lines = [job.watch(1.0) for _ in range(count)]
    try:
        read(lines, SETTLE_SECONDS)
        begin, before = time.monotonic(), {name: processor_seconds(pid) for name, pid in pids.items()}
        read(lines, seconds)
        end = time.monotonic()
        shares = {name: (processor_seconds(pid) - before[name]) / (end - begin) for name, pid in pids.items()}
    finally:
        for line in lines:
            line.close()
    return count, begin, end, shares


def read(lines: list[LiveSource], seconds: float) -> None:
    """Read what comes in so many seconds."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as ways:
        for line in lines:
            ways.register(line, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in ways.select(left):
                answer = key.fileobj.receive(0.0)  # type: ignore[union-attr]  # it is a LiveSource
                if answer is None or "error" in answer:
                    raise SystemExit(f"the launcher answers {answer}")


if __name__ == "__main__":
    main()
