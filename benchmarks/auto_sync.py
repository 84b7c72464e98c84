"""What the strategy auto makes of links: its steps beside those of fixed ways, in turns, in one job.

    benchmarks/shaped_hosts 4 1gbit '$MPIEXEC .venv/bin/python benchmarks/auto_sync.py --millions 5'

Model and steps are those of plan_measured.py: a step computes by sleeping, because the hosts share the cores of one
machine. Shown are

    step        the median of all steps, but for the first 13, in which auto has no choice yet
    with trials the mean of auto's steps from the first one on, which has its forecasts, trials and changes
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import mpitrain as mt
from mpitrain.forecast.rounds import versions_line
from mpitrain.reducer.exchange import make_exchange
from plan_measured import parts

_FIRST = 13


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=5.0, help="of parameters")
    parser.add_argument("--milliseconds", type=float, default=300.0, help="of a step of one rank with the whole batch")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="of each way in a turn")
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    world = mt.init()
    strategies: dict[str, mt.Sync] = {
        "plain": mt.Sync(),
        **{name: mt.Sync(partial(make_exchange, compression=name)) for name in ("bf16", "int8")},
        "auto": mt.AutoSync(),
        "auto, bf16 allowed": mt.AutoSync(codecs=["bf16"]),
        "auto, bf16 and int8 allowed": mt.AutoSync(codecs=["bf16", "int8"]),
    }
    world.print(versions_line())
    made = {name: parts(options, world, strategy, 1.0) for name, strategy in strategies.items()}
    for one in made.values():
        one.strategy.begin(world, one.adapter)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.turns):
        for name, one in made.items():
            adapter, strategy, data = one.adapter, one.strategy, one.data
            world.barrier()
            for _ in range(options.steps):
                start = time.perf_counter()
                batch, weight = next(data)
                strategy.begin_step(weight)
                strategy.finish_step(adapter, adapter.loss_and_gradients(batch, strategy.on_gradient))
                seconds[name].append(time.perf_counter() - start)
    if world.is_root:
        medians = {name: statistics.median(taken[_FIRST:]) for name, taken in seconds.items()}
        print("| strategy | step | beside plain | with trials |")
        print("| --- | --- | --- | --- |")
        for name, median in medians.items():
            mean = f"{statistics.mean(seconds[name]) * 1e3:.0f} ms" if name.startswith("auto") else ""
            print(f"| {name} | {median * 1e3:.0f} ms | {median / medians['plain']:.2f} | {mean} |")


if __name__ == "__main__":
    main()
