"""What saving costs a step: the same training with and without checkpoints, in alternating blocks.

    mpiexec -n 2 python benchmarks/checkpoint_step.py DIRECTORY

The state has --mb megabytes (parameters and momentum); a step computes as much as all ranks at once can in
--step-ms. Blocks of --steps steps take turns: one with a save in its first step, whose writing goes on in those that
follow, and one without. The cost is the time of a block over that of the one before, the slowest rank's. Medians over
--blocks of each, with quartiles. The first two do not count: they make the buffers. It matters whether the ranks leave
a core to the thread that writes.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy

import mpitrain as mt
from mpitrain.forecast.rounds import versions_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--blocks", type=int, default=5)
    arguments = parser.parse_args()
    world = mt.init()
    count = int(arguments.mb * 1e6 / 8)
    matrix = numpy.random.default_rng(0).standard_normal((400, 400)).astype("float32")
    gradient = numpy.ones(count, "float32")

    def compute(products: int) -> None:
        for _ in range(products):
            matrix @ matrix

    compute(20)  # the first ones take longer
    started = time.perf_counter()
    compute(20)
    one = (time.perf_counter() - started) / 20
    products = world.broadcast_object(round(arguments.step_ms / 1e3 / one))

    def function(_parameters, _batch, on_gradient):
        on_gradient("w", gradient)
        compute(products)
        return 0.0

    def build(world: mt.World) -> mt.Parts:
        adapter = mt.ArrayFunction(function, {"w": numpy.zeros(count, "float32")}, mt.optim.SGD(1e-6, momentum=0.9))
        return mt.Parts(adapter, mt.Sync(), mt.data.ArrayData(world, numpy.zeros((64, 1)), global_batch=64))

    class Blocks(mt.Hook):
        """Turns the checkpoints on for one block, off for the other, and keeps the times of the blocks."""

        def __init__(self) -> None:
            self.seconds: dict[str, list[float]] = {"without": [], "with": []}
            self.saves = mt.Checkpoint(arguments.directory, steps=1, keep=2)
            self.started = 0.0

        def before_run(self, trainer: mt.Trainer) -> None:
            self.saves.before_run(trainer)
            self.first = trainer.step_number

        def after_run(self, trainer: mt.Trainer) -> None:
            self.saves.after_run(trainer)

        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            block, place = divmod(step.number - self.first - 1, arguments.steps)
            kind = "with" if block % 2 else "without"
            if place == 0 and kind == "with":
                self.saves.after_step(trainer, step)
            if place == arguments.steps - 1:
                now = time.perf_counter()
                if block >= 2:
                    self.seconds[kind].append(now - self.started)
                self.started = now

    blocks = Blocks()
    last = 2 * (arguments.blocks + 1) * arguments.steps
    trainer = mt.Trainer(build, [blocks])
    trainer.last_step = last
    trainer.run()
    slowest = {
        kind: [max(of_ranks) for of_ranks in zip(*world.allgather(own), strict=True)]
        for kind, own in blocks.seconds.items()
    }
    world.print(versions_line())
    world.print(f"{world.size} ranks, state of {arguments.mb:.0f} MB, one save every {arguments.steps} steps")
    for kind, seconds in slowest.items():
        low, middle, high = (value / arguments.steps * 1e3 for value in statistics.quantiles(seconds, n=4))
        world.print(f"{kind:>8}: {middle:.2f} ms a step [{low:.2f} to {high:.2f}]")
    costs = [a / b - 1 for a, b in zip(slowest["with"], slowest["without"], strict=True)]
    low, middle, high = statistics.quantiles(costs, n=4)
    world.print(f"    cost: {middle:.2%} [{low:.2%} to {high:.2%}]")


if __name__ == "__main__":
    main()
