"""Who should drive the exchange during the backward pass: nobody, the reducer itself between layers, or a thread?

    mpiexec -n 2 python benchmarks/overlap.py
    benchmarks/shaped_hosts 2 1gbit '$MPIEXEC .venv/bin/python benchmarks/overlap.py'

The backward pass is made of matrix products, one a layer, and hands in a gradient after each. `hidden` is the share
of the exchange's own time that a step does not take longer for: 1 - (step - compute) / exchange. `cpu` is CPU seconds
a step over wall seconds a step.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy

import mpitrain as mt
from mpitrain.forecast.rounds import alternate, ratio, versions_line


class Late(mt.GradientReducer):
    """Exchanges nothing before the last gradient is in."""

    def progress(self) -> bool:
        return not self._missing and super().progress()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--mib", type=float, default=16, help="of gradients")
    parser.add_argument("--compute", type=float, default=1.5, help="length of the backward pass, in exchanges")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    world = mt.init()
    count = int(arguments.mib * 2**18 / arguments.layers)
    parameters = [mt.Parameter(f"layer{i}", (count,), numpy.dtype("float32")) for i in range(arguments.layers)]
    gradients = [numpy.full(count, world.rank, numpy.float32) for _ in parameters]
    made = {
        "nobody": Late(world, parameters, threaded=False),
        "itself": mt.GradientReducer(world, parameters, threaded=False),
        "thread": mt.GradientReducer(world, parameters, threaded=True),
    }

    def step(reducer: mt.GradientReducer, compute: Callable[[], object]) -> None:
        reducer.begin(1.0)
        for index in reversed(range(arguments.layers)):
            compute()
            reducer.ready(index, gradients[index])
        reducer.finish()

    exchange = statistics.median(alternate(world, {"x": lambda: step(made["itself"], int)}, 5)["x"])
    matrix = numpy.random.default_rng(0).standard_normal((400, 400)).astype(numpy.float32)
    product = statistics.median(alternate(world, {"x": lambda: matrix @ matrix}, 50)["x"])
    repeats = max(1, round(arguments.compute * exchange / arguments.layers / product))

    def layer() -> None:
        for _ in range(repeats):
            matrix @ matrix

    variants: dict[str, Callable[[], object]] = {
        "compute": lambda: [layer() for _ in range(arguments.layers)],
        "exchange": lambda: step(made["itself"], int),
    }
    cpu = dict.fromkeys(made, 0.0)

    def measured(name: str) -> None:
        started = time.process_time()
        step(made[name], layer)
        cpu[name] += time.process_time() - started

    variants |= {name: lambda name=name: measured(name) for name in made}
    seconds = alternate(world, variants, arguments.rounds)
    world.print(f"{world.size} ranks on {world.num_nodes} nodes, {arguments.mib} MiB in {arguments.layers} layers")
    world.print(versions_line())
    alone = {name: statistics.median(seconds[name]) for name in ("compute", "exchange")}
    world.print(", ".join(f"{name} alone {value * 1e3:.1f} ms" for name, value in alone.items()))
    for name in made:
        times = zip(seconds[name], seconds["compute"], seconds["exchange"], strict=True)
        hidden = [1 - (both - compute) / exchange for both, compute, exchange in times]
        low, middle, high = statistics.quantiles(hidden, n=4)
        median = statistics.median(seconds[name])
        share = cpu[name] / (sum(seconds[name]) + median)  # alternate() makes one call more than it times
        world.print(
            f"driven by {name}: step {median * 1e3:.1f} ms, hidden {middle:.0%} [{low:.0%} to {high:.0%}], "
            f"cpu {share:.2f}, step / itself {ratio(seconds, name, 'itself')[0]:.2f}"
        )


if __name__ == "__main__":
    main()
