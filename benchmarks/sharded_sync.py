"""What a divided optimizer costs in time and saves in memory: mt.ShardedSync against mt.Sync, with AdamW.

    export MALLOC_MMAP_THRESHOLD_=131072
    mpitrain run -n 2 benchmarks/sharded_sync.py [--parameters 4000000] [--layers 8] [--steps 5] [--rounds 15]

Both strategies train a model of the same float32 parameters, whose gradients cost nothing but their copy into the
buckets. So a step is exchange and update alone, the worst case for a ratio. Each round has `--steps` steps of one
strategy, then as many of the other. Printed are the ratio of the rounds (median, 10th and 90th percentile), and the
memory of the optimizer on each rank: resident private memory (RssAnon) with AdamW less that with an SGD without state,
after two steps of a new model. Of ShardedSync, this leaves out the copies of the own parameters and gradients, which
SGD has too; they are in the second number. With the variable, memory that was freed is not resident any more.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

import mpitrain as mt
from mpitrain.forecast.rounds import alternate, ratio, versions_line
from mpitrain.strategies import Strategy

STRATEGIES: dict[str, Callable[[], Strategy]] = {"Sync": mt.Sync, "ShardedSync": mt.ShardedSync}


class Training:
    """A model of `layers` equal parameters and a strategy."""

    def __init__(self, world: mt.World, strategy: Strategy, optimizer: Any, parameters: int, layers: int) -> None:
        shape = (parameters // layers // 1000, 1000)
        values = {f"layer{number}": numpy.ones(shape, numpy.float32) for number in range(layers)}
        gradient = numpy.random.default_rng(world.rank).standard_normal(shape).astype(numpy.float32)

        def function(parameters: Any, _: Any, on_gradient: Any) -> float:
            for name in reversed(parameters):
                on_gradient(name, gradient)
            return 1.0

        self._strategy, self._model = strategy, mt.ArrayFunction(function, values, optimizer)
        strategy.begin(world, self._model)

    def steps(self, number: int) -> None:
        """Make so many steps."""
        for _ in range(number):
            self._strategy.begin_step(1.0)
            loss = self._model.loss_and_gradients(numpy.ones(1), self._strategy.on_gradient)
            self._strategy.finish_step(self._model, loss)

    def close(self) -> None:
        """Give back what the strategy has made."""
        self._strategy.close()


def private_mib() -> float:
    """The resident private memory of this process."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def memory(world: mt.World, name: str, optimizer: Any, options: argparse.Namespace) -> float:
    """The private memory of a training after two steps, on the rank with the most."""
    before = private_mib()
    training = Training(world, STRATEGIES[name](), optimizer, options.parameters, options.layers)
    training.steps(2)
    used = private_mib() - before
    training.close()
    return max(world.allgather(used))


def main() -> None:
    """Measure the memory, then time both strategies in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=4_000_000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    world = mt.init()
    world.print(versions_line())
    world.print(f"{world.size} ranks on {world.num_nodes} nodes, {options.parameters} parameters")
    for name in STRATEGIES:
        bare = memory(world, name, mt.optim.SGD(0.1), options)
        whole = memory(world, name, mt.optim.AdamW(0.001), options)
        world.print(f"{name}: optimizer {whole - bare:.1f} MiB, training {whole:.1f} MiB a rank")
    trainings = {
        name: Training(world, make(), mt.optim.AdamW(0.001), options.parameters, options.layers)
        for name, make in STRATEGIES.items()
    }
    calls = {name: (lambda one=one: one.steps(options.steps)) for name, one in trainings.items()}
    load = os.getloadavg()[0]
    seconds = alternate(world, calls, options.rounds)
    for name in STRATEGIES:
        middle, least = (
            1000 * value / options.steps for value in (statistics.median(seconds[name]), min(seconds[name]))
        )
        world.print(f"{name}: {middle:.1f} ms a step, {least:.1f} ms in the fastest round")
    middle, low, high = ratio(seconds, "ShardedSync", "Sync")
    world.print(f"ShardedSync / Sync: {middle:.3f} ({low:.3f} to {high:.3f}), load {load:.0f} at the beginning")


if __name__ == "__main__":
    main()
