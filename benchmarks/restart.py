"""How long a training stands still when a rank is killed, for versions or options of mpitrain in turn.

    python benchmarks/restart.py SIDE... [--trials 10] [--ranks 4] [--torch] [--bed BED]

A SIDE is NAME=COMMAND, such as "warm=.venv/bin/python -m mpitrain run --max-restarts 1"; one whose name begins with
"cold" is killed before its warm interpreters are ready. With --bed, as root, commands run on its first node,
in the share, with two ranks on each of its four nodes. Each trial is a job whose last rank ends itself by SIGKILL, when
its warm interpreters (or, of versions before, its spares) are ready. The time is from the kill to the end of the first
step after that, on the slowest rank. Printed are median, lowest and highest, and ratios to the first side.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from testbed import Bed, find

DEADLINE_SECONDS = 400.0
SHARE = "/home/cluster/nfs"
ENVIRONMENT = ("PATH=/usr/local/lib/mpitrain/bin:/usr/bin:/bin", "HOME=/home/cluster", "UCX_TLS=tcp,self")

# A step takes 20 ms, and every fifth is copied to memory.
SCRIPT = """
import os, pathlib, signal, sys, time
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
        killed = folder / "killed"
        if world.rank == world.size - 1 and step.number % 10 == 0 and (folder / "go").exists() and not killed.exists():
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

mt.Trainer(build, [mt.StopAtStep(10**6), Stamps()]).run()
"""


def stamps(folder: Path, rank: int) -> list[tuple[float, int]]:
    """The steps that a rank has made: when each ended, and in which process."""
    path = folder / f"stamps{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(words[0]), int(words[1])) for line in lines if len(words := line.split()) == 3]


def num_warm(folder: str) -> int:
    """The warm interpreters on this machine, also those in containers, of the job with this folder."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_warm = (entry / "comm").read_text().strip() == "mpitrain-warm"
            count += is_warm and folder.encode() in (entry / "cmdline").read_bytes().split(b"\0")
    return count


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the job has ended, or makes no steps")
        time.sleep(0.1)


def trial(name: str, side: str, options: argparse.Namespace, bed: Bed | None) -> float:
    """Seconds from the kill to the next step."""
    below = Path(f"/proc/{bed.node('node1').pid()}/root{SHARE}") if bed is not None else Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="restart-", dir=below))
    folder.chmod(0o777)
    named = f"{SHARE}/{folder.name}" if bed is not None else str(folder)
    (folder / "train.py").write_text(f"{'import torch' * options.torch}\n{SCRIPT}")
    (folder / "train.py").chmod(0o644)
    how = "--ppn 2" if bed is not None else f"-n {options.ranks}"
    command = f"{side} {how} {named}/train.py {named} < /dev/null > {named}/output 2>&1 & echo $! > {named}/pid"
    run(bed, f"MPITRAIN_MEMORY_STEPS=5 {command}")
    ranks, hosts = (8, 4) if bed is not None else (options.ranks, 1)
    try:
        wait_for(lambda: len(stamps(folder, ranks - 1)) > 50)
        if not name.startswith("cold"):
            wait_for(lambda: b"are ready" in (folder / "output").read_bytes() or num_warm(named) == hosts)
            time.sleep(3)
        (folder / "go").touch()
        wait_for(lambda: (folder / "killed").exists() and (folder / "killed").read_text())
        killed = float((folder / "killed").read_text())
        old = {rank: {pid for at, pid in stamps(folder, rank) if at < killed} for rank in range(ranks)}

        def after() -> list[float]:
            new = [[at for at, pid in stamps(folder, rank) if pid not in old[rank]] for rank in range(ranks)]
            return [steps[0] for steps in new if steps]

        wait_for(lambda: len(after()) == ranks)
        return max(after()) - killed
    finally:
        run(bed, f"kill $(cat {named}/pid); while kill -0 $(cat {named}/pid) 2> /dev/null; do sleep 0.2; done")


def run(bed: Bed | None, line: str) -> None:
    """Run a line of shell here, or on the first node of the bed as the shared user."""
    if bed is None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(["bash", "-c", line], check=True, timeout=DEADLINE_SECONDS, env=environment, cwd="/")
    else:
        shell = ["env", "-i", "-C", "/", *ENVIRONMENT, "bash", "-c", f"cd {SHARE}; {line}"]
        bed.node_run("node1", ["runuser", "-u", "cluster", "--", *shell], timeout_seconds=DEADLINE_SECONDS)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="+", metavar="SIDE")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--torch", action="store_true", help="the script imports PyTorch")
    parser.add_argument("--bed")
    options = parser.parse_args()
    sides = dict(side.split("=", 1) for side in options.sides)
    bed = find(options.bed) if options.bed else None
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.trials):
        for name in sides if number % 2 else reversed(sides):
            seconds[name].append(trial(name, sides[name], options, bed))
            print(f"{name}: {seconds[name][-1]:.2f} s, load {os.getloadavg()[0]:.0f}", flush=True)
    first = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"{name:<12} {middle:6.2f} s ({min(times):.2f} to {max(times):.2f}), ratio {middle / first:.2f}")


if __name__ == "__main__":
    main()
