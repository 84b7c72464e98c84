"""What the agreement of a step costs while no rank is lost: steps with `world.commit()` against steps without it.

    mpitrain run -n 4 --recover benchmarks/commit.py [--milliseconds 50] [--steps 20] [--rounds 15]

Each round has `--steps` steps of one kind, then as many of the other. In a step each rank sleeps for `--milliseconds`,
and then takes part in a mean of 1000 numbers. Printed are the time of `commit` by itself, behind a barrier, and the
ratio of the rounds (median, 10th and 90th percentile). To see what a ratio of 1 looks like, run it without `--recover`:
there `commit` does nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy

import mpitrain as mt
from mpitrain.bench.rounds import alternate, ratio, versions_line


def main() -> None:
    """Time both kinds of steps in turn, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    world = mt.init()
    values = numpy.ones(1000)

    def steps(*, commits: bool) -> None:
        for _ in range(options.steps):
            time.sleep(options.milliseconds / 1000)
            world.mean(values)
            if commits:
                world.commit()

    alone = []
    for _ in range(200):
        world.barrier()
        began = time.perf_counter()
        world.commit()
        alone.append(time.perf_counter() - began)
    seconds = alternate(
        world, {"with": lambda: steps(commits=True), "without": lambda: steps(commits=False)}, options.rounds
    )
    world.print(versions_line())
    step = statistics.median(seconds["without"]) / options.steps
    world.print(
        f"{world.size} ranks on {world.num_nodes} nodes, load {os.getloadavg()[0]:.0f}; a step takes "
        f"{1000 * step:.2f} ms, a commit by itself {1e6 * statistics.median(alone):.0f} us (median of 200 on rank 0)"
    )
    middle, low, high = ratio(seconds, "with", "without")
    world.print(f"with commit / without: {middle:.4f} ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
