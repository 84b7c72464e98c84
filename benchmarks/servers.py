"""Several servers: how long a step takes whose pulls and pushes are spread over their links.

    benchmarks/shaped_hosts 6 100mbit '$MPIEXEC .venv/bin/python benchmarks/servers.py --servers 2 --mbit 100'

One rank on each host: the servers, and all others are workers. A job is one sample; a worker computes it for --compute
seconds, in which it sleeps. With --mbit, the line also has the time in which the busiest link, a server's or a
worker's, carries its pulls and then its pushes. A step may take less: a pull of one worker and a push of another use
the two directions of a link at once. Encrypted, as always. servers_study.py runs this for many numbers of both.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy

import mpitrain as mt
from mpitrain.context import JobContext
from mpitrain.forecast.rounds import spread, versions_line
from mpitrain.job.start import the_job

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps with several servers.")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--mib", type=float, default=2.0, help="size of the parameters")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compute", type=float, default=0.0, help="seconds in which a worker sleeps for a sample")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--mbit", type=float, help="rate of the links, for the bound")
    arguments = parser.parse_args()
    os.environ |= JobContext(servers=arguments.servers).variables()  # as `mpitrain run --servers` does
    world = mt.init()
    everyone = the_job().everyone
    assert everyone is not None
    num_workers = everyone.size - arguments.servers
    count = int(arguments.mib * 2**20) // 4
    gradient = numpy.random.default_rng(1).standard_normal(count).astype("float32")

    def function(_: Any, __: Any, on_gradient: Any) -> float:
        time.sleep(arguments.compute)
        on_gradient("w", gradient)
        return 1.0

    def build(world: mt.World) -> mt.Parts:
        data = mt.data.ArrayData(world, numpy.arange(1000 * num_workers), global_batch=num_workers)
        model = mt.ArrayFunction(function, {"w": numpy.zeros(count, "float32")}, mt.optim.SGD(0.1))
        return mt.Parts(model, mt.ParameterServer(arguments.mode, unit_samples=1), data)

    class Times(mt.Hook):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.samples: list[float] = []

        def reads_model(self, trainer: mt.Trainer, step: int) -> bool:
            return False

        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            self.seconds.append(step.seconds)
            self.samples.append(step.samples)

    times = Times()
    warm_up = WARM_UP if arguments.mode == "sync" else WARM_UP * num_workers
    trainer = mt.Trainer(build, [mt.StopAtStep(warm_up + arguments.steps), times], world)
    trainer.run()
    print(versions_line())
    median, low, high = spread(times.seconds[warm_up:])
    line = f"{arguments.servers} servers, {num_workers} workers on {everyone.num_nodes} hosts, {arguments.mib:g} MiB: "
    line += f"{median * 1e3:,.0f} ms a step ({low * 1e3:,.0f} to {high * 1e3:,.0f})"
    line += f", {sum(times.samples[warm_up:]) / sum(times.seconds[warm_up:]):.2f} samples/s"
    if arguments.mbit:
        busiest = max(num_workers / arguments.servers, 1)
        one_by_one = 2 * busiest * count * 4 * 8 / (arguments.mbit * 1e6)
        line += f"; pulls, then pushes on the busiest link: {one_by_one * 1e3:,.0f} ms"
    print(line)
    stats = trainer.strategy.stats  # type: ignore[attr-defined]
    print("MB in, out:", *(f"{one.bytes_in / 1e6:.1f}, {one.bytes_out / 1e6:.1f};" for one in stats.servers))


if __name__ == "__main__":
    main()
