"""Many jobs of one server while its workers are killed: is its memory flat, and does each sample count once?

    python benchmarks/serve_soak.py [--jobs 100000] [--workers 4] [--every 3] [--seconds 0] [--mode async]

Real processes on this machine: `mpitrain serve`, and `mpitrain work` several times. At random moments, --every seconds
apart in the mean, a worker is killed (SIGKILL), and another one started. The model is one number for each of 1,000
samples: an update adds 1 to the number of each sample of its job, whatever the parameters are, and all values are
exact. So at the end the parameters are a count that is independent of the server's own. It is compared with the
position in the data, and with the samples that the steps had. The server's resident memory is read twice a second.

A job takes a millisecond, so 100,000 are done within two minutes, and see few kills. With --seconds, a worker sleeps
for so long in each job. A worker that was started when the server ended waits for another server, and ends with exit
code 1 after two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpitrain.bench.rounds import versions_line

SCRIPT = """
import json, sys, time
import numpy
import mpitrain as mt

mode, jobs, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
NUM, JOB = 1000, 10

def counting(parameters, batch, on_gradient):
    time.sleep(seconds)
    gradient = numpy.zeros(NUM)
    numpy.subtract.at(gradient, batch, 1.0)
    on_gradient("count", gradient)
    return 1.0

def build(world):
    data = mt.ArrayData(world, numpy.arange(NUM), global_batch=JOB, seed=5)
    model = mt.ArrayFunction(counting, {"count": numpy.zeros(NUM)}, mt.Sgd(1.0))
    return mt.Parts(model, mt.ParameterServer(mode), data)

class Samples(mt.Hook):
    total = 0

    def after_step(self, trainer, step):
        self.total += step.samples
        if step.number % 1000 == 0:
            print("step", step.number, flush=True)

samples = Samples()
trainer = mt.Trainer(build, [mt.StopAtStep(jobs), samples])
trainer.run()
counts, state = trainer.adapter.parameters()["count"], trainer.data.state()
expected = numpy.full(NUM, float(state["epoch"]))
data = mt.ArrayData(mt.init(), numpy.arange(NUM), global_batch=JOB, seed=5)
expected[data.read(state["epoch"], 0, state["cursor"])] += 1
for epoch, begin, end in state.get("left", []):
    expected[data.read(epoch, begin, end)] -= 1
ledger = trainer.strategy.ledger
said = {
    "samples": samples.total,
    "counted": float(counts.sum()),
    "wrong": int((counts != expected).sum()),
    "workers": len(ledger.workers),
    "dropped": sum(one.dropped for one in ledger.workers),
    "staleness": max(ledger.staleness),
}
print("end", json.dumps(said), flush=True)
"""

_HANG_SECONDS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds from one kill to the next")
    parser.add_argument("--seconds", type=float, default=0.0, help="that each job takes longer")
    parser.add_argument("--mode", choices=("async", "bounded"), default="async")
    parser.add_argument("--minutes", type=float, default=40.0, help="the longest time")
    options = parser.parse_args()
    print(f"{versions_line('pyzmq')}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        soak(Path(name), options)
    print(f"load {statistics.mean(os.getloadavg()):.1f}")


def soak(folder: Path, options: argparse.Namespace) -> None:
    """Run once, and print what was found."""
    (folder / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])

    program = [str(folder / "train.py"), options.mode, str(options.jobs), str(options.seconds)]

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        with (folder / name).open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "mpitrain", *words, *program],
                env={**os.environ, "XDG_STATE_HOME": str(folder), "MPITRAIN_HANG_SECONDS": str(_HANG_SECONDS)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    chance = random.Random(0)
    server = start("server", "serve", "--port", port)
    while not (folder / "mpitrain" / f"serve-{port}.key").exists() and server.poll() is None:
        time.sleep(0.1)
    workers: list[subprocess.Popen[bytes]] = []
    memory: list[tuple[int, float]] = []  # steps and MiB
    kills = 0
    begun = time.monotonic()
    kill_at = begun + 10
    try:
        while server.poll() is None and time.monotonic() - begun < 60 * options.minutes:
            while len(workers) < options.workers:
                workers.append(start("workers", "work", f"127.0.0.1:{port}"))
            time.sleep(0.2)
            if time.monotonic() > kill_at:
                victim = workers.pop(chance.randrange(len(workers)))
                victim.kill()
                victim.wait()
                kills += 1
                kill_at = time.monotonic() + chance.uniform(0, 2 * options.every)
            if time.monotonic() - begun > len(memory) / 2:
                memory.append((_step(folder), _resident_mib(server.pid)))
        seconds = time.monotonic() - begun
        codes = [worker.wait(2 * _HANG_SECONDS) for worker in workers] if server.poll() is not None else []
    finally:
        for process in (server, *workers):
            if process.poll() is None:
                process.kill()
            process.wait()
    if any(codes):
        print(
            "the workers' last lines:", *(folder / "workers").read_text(errors="replace").splitlines()[-4:], sep="\n  "
        )
    print(f"{_step(folder)} jobs in {seconds:.0f} s, {kills} kills; exit codes {server.returncode} and {sorted(codes)}")
    trained = [(step, mib) for step, mib in memory if step and mib]
    for tenth in range(10):
        part = trained[len(trained) * tenth // 10 : len(trained) * (tenth + 1) // 10] or trained[-1:]
        print(f"up to job {part[-1][0]:7}: {statistics.median(mib for _, mib in part):8.2f} MiB")
    found = re.search(r"^end (.*)$", (folder / "server").read_text(), re.MULTILINE)
    print(json.loads(found[1]) if found else (folder / "server").read_text()[-2000:])


def _step(folder: Path) -> int:
    steps = re.findall(r"^step (\d+)$", (folder / "server").read_text(errors="replace"), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def _resident_mib(process: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


if __name__ == "__main__":
    main()
