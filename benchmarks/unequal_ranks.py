"""Ranks of unequal speed: equal parts of each batch against parts by measured speed, and the sum of all speeds.

    mpiexec -n 3 python benchmarks/unequal_ranks.py
    mpiexec -n 3 python benchmarks/unequal_ranks.py --slower 1,1,3 --prefetch

Rank r sleeps for --milliseconds times its factor in --slower for each of its samples, in place of a model's arithmetic.
The bound is the sum of the ranks' speeds, were each one alone: no exchange, no waiting. Both sides run in turn in one
job; samples/s of whole steps, by the slowest rank's clock.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy

import mpitrain as mt
from mpitrain.forecast.rounds import spread, versions_line

WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", default="1,2,4", help="a factor for each rank; the last one for all that follow")
    parser.add_argument("--milliseconds", type=float, default=2.0, help="a sample of the fastest rank")
    parser.add_argument("--global-batch", type=int, default=140)
    parser.add_argument("--steps", type=int, default=10, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefetch", action="store_true")
    arguments = parser.parse_args()
    world = mt.init()
    factors = [float(text) for text in arguments.slower.split(",")]
    factor = factors[min(world.rank, len(factors) - 1)]
    seconds = arguments.milliseconds * 1e-3 * factor

    def build(world: mt.World) -> mt.Parts:
        arrays = numpy.zeros((100 * arguments.global_batch, 16), "float32")
        data = mt.data.ArrayData(world, arrays, global_batch=arguments.global_batch)
        adapter = mt.ArrayFunction(sleeping(seconds), {"w": numpy.zeros(10_000, "float32")}, mt.optim.SGD(0.1))
        return mt.Parts(adapter, mt.Sync(), mt.data.Prefetch(data) if arguments.prefetch else data)

    world.print(versions_line())
    world.print(f"{world.size} ranks, one sample takes rank r {arguments.milliseconds} ms x {arguments.slower}")
    equal = mt.Trainer(build)
    measured = mt.Trainer(build, [mt.Balance(WARM_UP), mt.StopAtStep(WARM_UP)])
    measured.run()
    rates: dict[str, list[float]] = {"equal parts": [], "measured parts": []}
    alone: list[float] = []
    for number in range(arguments.rounds):
        sides = [("equal parts", equal), ("measured parts", measured)]
        for name, trainer in reversed(sides) if number % 2 else sides:
            rates[name].append(samples_per_second(world, trainer, arguments.steps))
        alone.append(sum(world.allgather(own_samples_per_second(equal, arguments.steps))))
    bound = statistics.median(alone)
    world.print(f"sum of speeds   {bound:8.1f} samples/s")
    for name, values in rates.items():
        middle, low, high = spread(values)
        world.print(f"{name:15} {middle:8.1f} samples/s [{low:.1f} to {high:.1f}], {middle / bound:.1%} of the sum")


def sleeping(seconds: float) -> Callable[..., float]:
    """A model that does nothing, slowly."""

    def function(parameters: dict, batch: numpy.ndarray, on_gradient: Callable) -> float:
        time.sleep(len(batch) * seconds)
        on_gradient("w", parameters["w"])
        return 0.0

    return function


def samples_per_second(world: mt.World, trainer: mt.Trainer, steps: int) -> float:
    """The rate of all ranks together."""
    world.barrier()
    started = time.perf_counter()
    samples = sum(trainer.step().samples for _ in range(steps))
    return samples / max(world.allgather(time.perf_counter() - started))


def own_samples_per_second(trainer: mt.Trainer, steps: int) -> float:
    """The rate of this rank with its equal part: only batch and gradients, without an exchange."""
    started = time.perf_counter()
    samples = 0
    for _ in range(steps):
        batch, count = next(trainer.data)
        trainer.adapter.loss_and_gradients(batch, lambda index, gradient: None)
        samples += count
    return samples / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
