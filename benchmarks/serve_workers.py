"""Unequal workers of one server: samples/s against the sum of the workers' own speeds, and who is served how often.

    mpiexec -n 9 python benchmarks/serve_workers.py unequal          # 8 workers in mode async, speeds 1 to 4
    mpiexec -n 9 python benchmarks/serve_workers.py backup           # sync with backup=2; one is ten times as slow
    mpiexec -n 5 python benchmarks/serve_workers.py many             # 100 workers in mode async, in threads
    benchmarks/shaped_hosts 9 1gbit '$MPIEXEC .venv/bin/python benchmarks/serve_workers.py unequal'

Rank 0 is the server, the other ranks share the workers, and each worker is a thread with a connection of its own. In
place of a model's arithmetic a worker sleeps; the gradient of --values numbers changes all of them. A worker's own
speed is that of its loop of read and gradient, without a server. Both sides run in turns; samples of the first seconds
of a run do not count. `s per GB` are CPU seconds of the whole server, its updates included, for each GB of gradients
and parameters. `most / least` compares the workers' samples, each divided by the worker's own speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["_MPITRAIN_SERVERS"] = "1"  # each rank has a World of its own

import numpy

import mpitrain as mt
from mpitrain.bench.rounds import spread, versions_line
from mpitrain.job.start import the_job
from serving import Build, Place, make_place, start_workers

# By name: workers, the slowness of each (the last one for all that follow), strategy, and of which workers the speeds
# make up the bound.
CASES: dict[str, tuple[int, list[float], dict[str, Any], int]] = {
    "unequal": (8, [1, 1, 4 / 3, 4 / 3, 2, 2, 4, 4], {"mode": "async"}, 8),
    "backup": (8, [1, 1, 1, 1, 1, 1, 1, 10], {"mode": "sync", "backup": 2}, 6),
    "many": (100, [1, 4 / 3, 2, 4] * 25, {"mode": "async"}, 100),
}
WARM_UP_SECONDS = 3.0


class Sleeper:
    """A worker's model. Notes when each of its gradients was ready, and of how many samples."""

    def __init__(self, seconds: float, values: int) -> None:
        self._seconds = seconds
        self._gradient = numpy.full(values, 1e-3, "float32")
        self.noted: list[tuple[float, int]] = []

    def __call__(self, parameters: Any, batch: numpy.ndarray, on_gradient: Callable[..., None]) -> float:
        time.sleep(len(batch) * self._seconds)
        on_gradient("w", self._gradient)
        self.noted.append((time.monotonic(), len(batch)))
        return 0.0

    def samples(self, begin: float, end: float) -> int:
        return sum(count for at, count in self.noted if begin < at <= end)


class Window(mt.Hook):
    """Counts the samples of updates after the warm-up, and ends the run. The window begins and ends with an update."""

    ends_run = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.begin = self.end = self.cpu = self.gigabytes = 0.0
        self.updates = self.samples = 0

    def before_run(self, trainer: mt.Trainer) -> None:
        self._first = 0.0

    def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
        now, cpu = time.monotonic(), time.process_time()
        ledger = trainer.strategy.ledger  # type: ignore[attr-defined]
        gigabytes = 1e-9 * (ledger.bytes_in + ledger.bytes_out)
        if not self._first:
            self._first = now
        if not self.begin:
            if now - self._first >= WARM_UP_SECONDS:
                self.begin, self._cpu, self._gigabytes = now, cpu, gigabytes
            return
        self.samples, self.updates = self.samples + step.samples, self.updates + 1
        self.end, self.cpu, self.gigabytes = now, cpu - self._cpu, gigabytes - self._gigabytes
        if now - self.begin >= self._seconds:
            trainer.last_step = step.number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--milliseconds", type=float, default=2.0, help="a sample of the fastest worker")
    parser.add_argument("--job", type=int, default=64, help="samples of a job of the fastest worker")
    parser.add_argument("--values", type=int, default=10_000, help="float32 numbers of the model")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="no encryption; for workers on the server's host")
    arguments = parser.parse_args()
    number, slowness, options, num_counted = CASES[arguments.case]
    mt.init(stall_seconds=600.0)  # a rank that waits for a worker's sleep is no news
    everyone = the_job().everyone
    assert everyone is not None
    batch = arguments.job * (num_counted if options["mode"] == "sync" else 1)
    mine = slowness[everyone.rank - 1 :: everyone.size - 1] if everyone.rank else []
    sleepers = [Sleeper(1e-3 * arguments.milliseconds * factor, arguments.values) for factor in mine]

    def build(function: Any) -> Build:
        def made(world: mt.World) -> mt.Parts:
            data = mt.ArrayData(world, numpy.zeros(1000 * batch, "float32"), global_batch=batch)
            model = mt.ArrayFunction(function, {"w": numpy.zeros(arguments.values, "float32")}, mt.Sgd(0.1))
            return mt.Parts(model, mt.ParameterServer(**options), data)

        return made

    if everyone.is_root:
        print(versions_line("pyzmq"))
        print(
            f"{arguments.case}: {number} workers on {everyone.num_nodes} hosts, {options}, {arguments.values} values, "
            f"a job of {arguments.job} samples takes the fastest {arguments.job * arguments.milliseconds:.0f} ms"
        )
    rows = []
    for index in range(arguments.rounds):
        sides = ("alone", "served")
        row: dict[str, Any] = {}
        for side in reversed(sides) if index % 2 else sides:
            everyone.barrier()
            if side == "alone":
                row["own"] = own_speeds(everyone, sleepers, build, arguments.seconds / 2, arguments.job)
            else:
                row |= served(everyone, sleepers, build, number, arguments.seconds, arguments.plain)
        if not everyone.is_root:
            continue
        bound = sum(sorted(row["own"], reverse=True)[:num_counted])
        shares = [count / speed for count, speed in zip(row["counts"], row["own"], strict=True)]
        row |= {"ratio": row["speed"] / bound, "shares": max(shares) / max(min(shares), 1e-9)}
        rows.append(row)
        print(
            f"{row['speed']:8.1f} samples/s of {bound:8.1f}: {row['ratio']:.3f}; most / least {row['shares']:.3f}; "
            f"least samples of a worker {min(row['counts'])}; {row['jobs']:.0f} updates/s, "
            f"CPU of the server {row['cpu']:.2f}, {row['cpu per GB']:.2f} s per GB, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    if everyone.is_root:
        for name in ("ratio", "shares", "cpu per GB"):
            median, low, high = spread([row[name] for row in rows])
            print(f"{name}: {median:.3f} ({low:.3f} to {high:.3f})")
        print(f"load {statistics.mean(os.getloadavg()):.1f}, {os.cpu_count()} cores")


def own_speeds(
    everyone: mt.World, sleepers: list[Sleeper], build: Callable[..., Build], seconds: float, job: int
) -> list[float]:
    """Samples/s of each worker without a server. Collective."""
    speeds = [0.0] * len(sleepers)

    def loop(index: int, function: Sleeper) -> None:
        parts = build(function)(mt.init())
        data: Any = parts.data
        begun, done, end = time.monotonic(), 0, 0.0
        while (end := time.monotonic()) - begun < seconds or done < 3 * job:
            parts.adapter.loss_and_gradients(data.read(0, done, done + job), lambda index, gradient: None)
            done += job
        speeds[index] = done / (end - begun)

    threads = [threading.Thread(target=loop, args=one) for one in enumerate(sleepers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [speed for of_rank in everyone.allgather(speeds) for speed in of_rank]


def served(
    everyone: mt.World, sleepers: list[Sleeper], build: Callable[..., Build], number: int, seconds: float, plain: bool
) -> dict[str, Any]:
    """Run server and workers once. Collective. Return what the server has counted, and the samples of each worker."""
    with tempfile.TemporaryDirectory() as name:
        place: Place | None = None
        if everyone.is_root:
            host = everyone.host if everyone.num_nodes > 1 else ""
            place = make_place(Path(name), host, "lo" if plain else "")
        place = everyone.broadcast(place)
        assert place is not None
        window = Window(seconds)
        if everyone.is_root:
            trainer = place.trainer("server", build(len), [window], number)
            trainer.run()
        else:
            for thread in start_workers(place, [build(function) for function in sleepers]):
                thread.join()
    begin, end = everyone.broadcast((window.begin, window.end))
    counts = everyone.allgather([function.samples(begin, end) for function in sleepers])
    length = max(end - begin, 1e-9)
    return {
        "speed": window.samples / length,
        "jobs": window.updates / length,
        "cpu": window.cpu / length,
        "cpu per GB": window.cpu / max(window.gigabytes, 1e-9),
        "counts": [count for of_rank in counts for count in of_rank],
    }


if __name__ == "__main__":
    main()
