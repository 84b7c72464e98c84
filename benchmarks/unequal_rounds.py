"""Rounds on unequal ranks: equal shares of a batch, shares by speed (mt.Balance), and the bound of unequal steps.

    mpiexec -n 3 python benchmarks/unequal_rounds.py

A rank's step sleeps for `--overhead` ms and, for each sample, for 1 ms times 1, 2, 4 and so on by rank. With `--jitter`
0.3, each step takes up to 30 % more or less. Steps are those of a Trainer with DiLoCo, in rounds of `--sync-every`. The
rates are those of the last two thirds of the steps, when the shares are set.

    equal       samples/s with equal shares
    balance     samples/s with shares by speed
    bound       samples/s if no rank ever waited for another one, each with steps of the equal share: what unequal
                numbers of steps could give at most. It is the sum of the ranks' samples per second of own work.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import numpy

import mpitrain as mt
from mpitrain.forecast.rounds import versions_line


class Rates(mt.Hook):
    """Samples/s of all ranks, and of this rank by its own work, since step `begin`."""

    def __init__(self, begin: int) -> None:
        self.begin, self.samples, self.own, self.own_seconds = begin, 0.0, 0.0, 0.0

    def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
        trainer.times_own_work = True
        if step.number == self.begin:
            self.began = time.perf_counter()
        if step.number > self.begin:
            self.samples += step.samples
            self.own, self.own_seconds = self.own + step.own_samples, self.own_seconds + step.own_seconds
            self.rate = self.samples / (time.perf_counter() - self.began)


def train(world: mt.World, options: argparse.Namespace, *hooks: mt.Hook) -> Rates:
    """Train, and return the rates."""
    noise = random.Random(world.rank)

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        seconds = (options.overhead + len(batch[0]) * 2**world.rank) / 1000
        time.sleep(seconds * (1 + options.jitter * noise.uniform(-1, 1)))
        on_gradient("w", numpy.zeros_like(parameters["w"]))
        return 0.0

    def build(its: mt.World) -> mt.Parts:
        adapter = mt.ArrayFunction(function, {"w": numpy.zeros(1000, numpy.float32)}, mt.optim.SGD(0.1))
        data = mt.data.ArrayData(its, (numpy.zeros(10 * options.batch, numpy.float32),), global_batch=options.batch)
        return mt.Parts(adapter, mt.DiLoCo(options.sync_every), data)

    rates = Rates(options.steps // 3)
    trainer = mt.Trainer(build, [mt.StopAtStep(options.steps), rates, *hooks])
    trainer.run()
    trainer.close()
    return rates


def main() -> None:
    """Print a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--overhead", type=float, default=0.0)
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sync-every", type=int, default=20)
    options = parser.parse_args()
    world = mt.init()
    equal = train(world, options)
    balance = train(world, options, mt.Balance(5, every=5))
    bound = sum(world.allgather(equal.own / equal.own_seconds))
    world.print(versions_line())
    world.print("| overhead | jitter | equal | balance | bound of unequal steps |")
    world.print("| --- | --- | --- | --- | --- |")
    row = f"{equal.rate:.0f} ({equal.rate / bound:.0%}) | {balance.rate:.0f} ({balance.rate / bound:.0%}) | {bound:.0f}"
    world.print(f"| {options.overhead:g} ms | {options.jitter:.0%} | {row} |")


if __name__ == "__main__":
    main()
