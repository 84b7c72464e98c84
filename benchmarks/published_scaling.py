"""The simulator against scaling that others have published: results/published-scaling.json has the figures and sources.

    python benchmarks/published_scaling.py                  # all rows; 128 parameter servers take minutes
    python benchmarks/published_scaling.py --most 32

Parameter servers, as many as workers and on the same nodes, are `direct`: each rank is the server of one part. What was
fitted, and nothing else:

- parameter servers: the rate between the two halves of the nodes, which each half has as its uplink. The published
  images/s stay the same from 64 nodes on, as they do where all nodes share one switch that is full.
- Horovod: the share of the link's 25 Gbit/s that gradients get, and the spread of computations, both the same for all
  models and numbers.

What was assumed: links of 10 Gbit/s for the parameter servers, which are never full; the four GPUs of one node are one
rank, and add without taking time; buckets of 64 MiB, Horovod's default.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.forecast.machines import equal_machines
from mpitrain.forecast.training import SimulatedTraining, simulate_steps
from mpitrain.profile import DEFAULT

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "results" / "published-scaling.json").read_text())
PARAMETERS: dict[str, int] = PUBLISHED["models"]["parameters"]

# Fitted: see the module.
HALVES_GBIT = 7.3
LINK_SHARE, SPREAD = 0.70, 0.02


class Row(NamedTuple):
    """One published number: its model, nodes, and efficiency, as it was published and simulated."""

    model: str
    num_nodes: int
    published: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative to the published one."""
        return self.simulated / self.published - 1


def parameter_servers(num_nodes: int, halves_gbit: float = HALVES_GBIT) -> Row:
    """One row of the parameter servers. `num_nodes`: even."""
    data = PUBLISHED["parameter servers"]
    rates, model = data["images_per_second"], data["model"]
    machines = replace(
        equal_machines(num_nodes, bytes_per_second=10e9 / 8),
        nodes_per_rack=num_nodes // 2,
        uplink_bytes_per_second=halves_gbit * 1e9 / 8,
    )
    compute = data["batch"] / rates["1"]
    training = SimulatedTraining(PARAMETERS[model], compute, data["batch"], "direct", bucket_mib=16)
    step = simulate_steps(machines, num_nodes, training, 2).mean_seconds
    return Row(model, num_nodes, rates[str(num_nodes)] / rates["1"] / num_nodes, compute / step)


def horovod(model: str, num_gpus: int, link_share: float = LINK_SHARE, spread: float = SPREAD) -> Row:
    """One row of Horovod."""
    data = PUBLISHED["horovod"]
    num_nodes = num_gpus // data["gpus_per_node"]
    machines = replace(
        equal_machines(num_nodes, bytes_per_second=link_share * data["gbit"] * 1e9 / 8, latency_seconds=10e-6),
        costs=replace(DEFAULT, add_bytes_per_second=1e15),
    )
    compute = data["batch"] / data["one_gpu"][model]
    training = SimulatedTraining(PARAMETERS[model], compute, data["batch"], "ring", bucket_mib=64, spread=spread)
    step = simulate_steps(machines, num_nodes, training, 20).mean_seconds
    return Row(model, num_nodes, data["efficiency"][str(num_gpus)][model], compute / step)


def rows(most: int) -> Iterator[tuple[str, Row]]:
    """All rows with so many nodes at most."""
    for number in PUBLISHED["parameter servers"]["images_per_second"]:
        if 1 < int(number) <= most:
            yield "parameter servers", parameter_servers(int(number))
    for number, models in PUBLISHED["horovod"]["efficiency"].items():
        for model in models:
            if int(number) // PUBLISHED["horovod"]["gpus_per_node"] <= most:
                yield "horovod", horovod(model, int(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=128, metavar="N", help="nodes (128)")
    print("| | model | nodes | published | simulated | error |\n| --- | --- | --- | --- | --- | --- |")
    for name, row in rows(parser.parse_args().most):
        cells = (name, row.model, row.num_nodes, f"{row.published:.1%}", f"{row.simulated:.1%}", f"{row.error:+.1%}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
