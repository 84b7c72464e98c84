"""The steps that `mpitrain plan` predicts, or the same steps measured, in one job on shaped links.

plan_study.py runs both, for several clusters. By hand, for one:

    benchmarks/shaped_hosts 4 1gbit '$MPIEXEC .venv/bin/python benchmarks/plan_measured.py predict \\
        --millions 5 --costs /tmp/costs4 --file /tmp/predicted'
    benchmarks/shaped_hosts 4 1gbit '$MPIEXEC .venv/bin/python benchmarks/plan_measured.py measure \\
        --millions 5 --file /tmp/measured'

`predict` does what the command does: it measures the profile of the hosts, then on each host alone the steps of a
Trainer, and predicts each way to exchange. `measure` trains in each way, in turns. Each adds a line of JSON to its
file, with the time. The hosts share the cores of one machine, so a step computes by sleeping, 2/3 of the time in the
backward pass. The optimizer's update is real.

While a way is measured, the machine's cores are watched: `full` is the share of the time of its steps in which they
were at least 90 % busy, in pieces of 50 ms. Real hosts have cores of their own. So where it is more than a tenth, these
cores are a bound that real hosts would not have.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy
from mpi4py import MPI

import mpitrain as mt
from mpitrain.forecast.cluster_profile import measure_cluster, measure_pairs, save_profile
from mpitrain.forecast.machines import from_profile
from mpitrain.forecast.measured_steps import read_times
from mpitrain.forecast.planner import Planner
from mpitrain.forecast.rounds import versions_line
from mpitrain.forecast.ways import ExchangeWay
from mpitrain.job.step_times import StepTimes
from mpitrain.job.worlds import make_world
from mpitrain.reducer.exchange import make_exchange
from mpitrain.strategies import Strategy

LAYERS = 12
WAYS = (
    ExchangeWay("ring"),
    ExchangeWay("direct"),
    ExchangeWay("auto", "bf16"),
    ExchangeWay("auto", "int8"),
    ExchangeWay("auto", "int4"),
    ExchangeWay("direct", sync_every=10),
)


def parts(options: argparse.Namespace, world: mt.World, strategy: Strategy, slow: float) -> mt.Parts:
    """A model that sleeps for the samples of its batch; its layers get wider towards the end."""
    widths = numpy.arange(1, LAYERS + 1)
    counts = (options.millions * 1e6 * widths / widths.sum()).astype(int)
    gradients = {f"layer{i:02}": numpy.full(count, 1e-3, numpy.float32) for i, count in enumerate(counts)}

    def function(_: object, batch: numpy.ndarray, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
        seconds = slow * options.milliseconds / 1000 * len(batch) / options.batch
        time.sleep(seconds / 3)
        for name in reversed(gradients):
            time.sleep(seconds * 2 / 3 / LAYERS)
            on_gradient(name, gradients[name])
        return 0.0

    values = {name: numpy.zeros_like(one) for name, one in gradients.items()}
    data = mt.data.ArrayData(world, numpy.zeros((options.batch * 64, 1), numpy.float32), global_batch=options.batch)
    return mt.Parts(mt.ArrayFunction(function, values, mt.optim.SGD(1e-3)), strategy, data)


def strategy_of(way: ExchangeWay) -> Strategy:
    """What trains in a way."""
    algorithm = None if way.algorithm == "auto" else way.algorithm
    exchange = partial(make_exchange, algorithm=algorithm, compression=way.codec)
    return mt.LocalSGD(way.sync_every, exchange=exchange) if way.sync_every > 1 else mt.Sync(exchange)


class InStep(mt.Hook):
    """Lets equal hosts begin their steps together, as in a job: here they share cores. Elsewhere they do not."""

    def __init__(self, everyone: mt.World) -> None:
        self._everyone = everyone

    def before_step(self, _: mt.Trainer) -> None:
        """See Hook."""
        self._everyone.barrier()


class Cores:
    """Watches the machine's cores, in pieces of 50 ms, while steps are made."""

    def __init__(self) -> None:
        self._pieces: list[tuple[float, float]] = []  # when each ended, and how busy it was
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        before = _jiffies()
        while not self._is_over.wait(0.05):
            now = _jiffies()
            if now[1] > before[1]:
                self._pieces.append((time.perf_counter(), 1 - (now[0] - before[0]) / (now[1] - before[1])))
            before = now

    def full(self, spans: Sequence[tuple[float, float]]) -> float:
        """Return the share of the pieces within the spans in which the cores were at least 90 % busy."""
        self._is_over.set()
        self._thread.join()
        busy = [busy for end, busy in self._pieces if any(begin <= end <= until for begin, until in spans)]
        return sum(one >= 0.9 for one in busy) / len(busy) if busy else 0.0


def _jiffies() -> tuple[int, int]:
    """Idle and all time of all cores."""
    values = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return values[3] + values[4], sum(values)


def predict(options: argparse.Namespace, world: mt.World, slow: float) -> dict[str, object]:
    """Measure what a plan measures, and predict. Return the line of the file, on rank 0."""
    folder = Path(world.broadcast_object(tempfile.mkdtemp(prefix="plan-") if world.is_root else None))
    began = time.perf_counter()
    if options.costs.exists():
        measured = json.loads(options.costs.read_text())
        pairs = measure_pairs(world.comm)
        off = [value for i, row in enumerate(pairs.latency_us) for j, value in enumerate(row) if i != j]
        measured["latency_between_nodes_us"] = statistics.median(off)
        measured["link_bytes_per_second"], measured["link_latency_us"] = pairs.bytes_per_second, pairs.latency_us
    else:
        measured = measure_cluster(world)
        if world.is_root:
            options.costs.write_text(json.dumps(measured))
    profiled = timed = time.perf_counter()
    if world.is_root:
        save_profile(folder / "profile.json", world, measured)
    told = replace(
        world.context, plan_record=str(folder / "times.json"), plan_steps=6, plan_ranks=("1", str(world.size))
    )
    alone = make_world(MPI.COMM_SELF, world.config, parent=world)
    times = StepTimes(world.replaced(context=told))
    hooks = [mt.StopAtStep(10**6)] if options.slow_last != 1 else [mt.StopAtStep(10**6), InStep(world)]
    trainer = mt.Trainer(lambda own: parts(options, own, mt.Sync(), slow), hooks, alone.replaced(watch=times))
    try:
        trainer.run()
    except SystemExit:
        timed = time.perf_counter()
    if not world.is_root:
        return {}
    hosts = read_times(folder / "times.json", "the model")
    planner = Planner(hosts, from_profile(folder / "profile.json"), is_profiled=False)
    predicted = {str(way): planner.forecast(world.size, way).step_seconds for way in WAYS}
    shutil.rmtree(folder)
    return {
        "predicted": predicted,
        "gbit": [rate * 8e-9 for rate in planner.machines.link_bytes_per_second],
        "sums": hosts[0].sums,
        "busy_cores": hosts[0].busy_cores,
        "cores": hosts[0].cores,
        "seconds_of": {
            "profile": profiled - began, "steps": timed - profiled, "forecast": time.perf_counter() - timed,
        },
    }  # fmt: skip


def measure(options: argparse.Namespace, world: mt.World, slow: float) -> dict[str, object]:
    """Train in each way. Return the line of the file."""
    made = {}
    for way in WAYS:
        made[way] = parts(options, world, strategy_of(way), slow)
        made[way].strategy.begin(world, made[way].adapter)
    cores = Cores() if world.is_root else None
    seconds: dict[ExchangeWay, list[float]] = {way: [] for way in WAYS}
    spans: dict[ExchangeWay, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(options.turns + 1):
        for way, one in made.items():
            adapter, strategy, data = one.adapter, one.strategy, one.data
            steps = way.sync_every if way.sync_every > 1 else options.steps if turn else 2
            world.barrier()
            began = time.perf_counter()
            for _ in range(1 if way.sync_every > 1 else steps):
                start = time.perf_counter()
                for _ in range(way.sync_every):
                    batch, weight = next(data)
                    strategy.begin_step(weight)
                    strategy.finish_step(adapter, adapter.loss_and_gradients(batch, strategy.on_gradient))
                taken = max(world.allgather(time.perf_counter() - start)) / way.sync_every
                if turn:
                    seconds[way].append(taken)
            if turn:
                spans[way].append((began, time.perf_counter()))
    if cores is None:
        return {}
    return {
        "measured": {str(way): taken for way, taken in seconds.items()},
        "full": {str(way): cores.full(of_way) for way, of_way in spans.items()},
    }


def main() -> None:
    """Add a line to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "measure"])
    parser.add_argument("--file", type=Path, required=True, help="gets a line of JSON")
    parser.add_argument("--row", default="", help="name of the line")
    parser.add_argument("--millions", type=float, default=5.0, help="of parameters")
    parser.add_argument("--milliseconds", type=float, default=300.0, help="of a step of one rank with the whole batch")
    parser.add_argument(
        "--costs", type=Path, default=Path("/tmp/costs"),
        help="memory and codecs of so many hosts; measured into this file if it is not there",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--slow-last", type=float, default=1.0, help="the last rank computes so many times as long")
    parser.add_argument("--steps", type=int, default=4, help="of each way in a turn")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    world = mt.init()
    slow = options.slow_last if world.rank == world.size - 1 else 1.0
    line = {"predict": predict, "measure": measure}[options.what](options, world, slow)
    if world.is_root:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = {"row": options.row, "time": now, "load": os.getloadavg()[0], "versions": versions_line()}
        with options.file.open("a") as file:
            file.write(json.dumps(about | line) + "\n")


if __name__ == "__main__":
    main()
