"""Step time against the rate of the links, for strategies and codecs: the picture of docs/how-to/low-communication.md.

    python benchmarks/step_time_picture.py docs/step-time.png

The lines are the least times for the bytes of docs/how-to/low-communication.md: 25 million parameters in 24 equal
layers and buckets,
4 nodes with one rank each, steps that compute for 0.306 s, a third of it in the forward pass, and TCP at its best. The
lines leave out what codecs compute, latency and the optimizer.

The points were measured; the hollow ones on a machine that was busy with other work. Where the computation or the
number of parameters was another one, both axes are scaled, so that the ratio of wire to computation stays. Points that
would cover each other stand side by side.

    every step      all that can hide behind the backward pass is hidden, so never the last bucket
    ShardedSync     the first half of the bytes hides as above, the second half follows the update
    rounds          an outer step hides nothing; shown is the mean of a round
    streaming       each of the fragments hides behind `DELAY` steps
    servers         the bounds of servers_study.py: one server on a node of its own, four workers, which see as many
                    samples as four ranks in a step
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import numpy

from servers_study import bound
from training_step import FORWARD, TCP, least_wait, sent_bytes

COMPUTE, NODES, LAYERS, WIDTH = 0.306, 4, 24, 1024
MILLIONS = LAYERS * (WIDTH * WIDTH + WIDTH) / 1e6
FRAGMENTS, DELAY = 4, 8


class Point(NamedTuple):
    """A step that was measured, on 4 hosts: `compute` and `seconds` without and with an exchange.

    It is drawn at `aside` times its place, so that it does not cover another point.
    """

    line: str
    millions: float
    mbit: float
    compute: float
    seconds: float
    aside: float = 1.0


# benchmarks/log/2026-11.md, "A training step with 25 million parameters between hosts": nothing else on the machine.
QUIET = [
    Point(line, MILLIONS, 1000, compute, seconds)
    for compute, by_line in (
        (0.306, {"Sync": 1.387, "Sync, bf16": 0.764, "Sync, int8": 0.436}),
        (0.606, {"Sync": 1.493, "Sync, bf16": 0.874, "Sync, int8": 0.633}),
        (1.207, {"Sync": 1.733, "Sync, bf16": 1.249, "Sync, int8": 1.234}),
    )
    for line, seconds in by_line.items()
] + [
    # "Measurements with the machine to themselves".
    Point("Sync, int4", MILLIONS, 1000, 0.319, 0.345),
    Point("Sync, top_k:0.01", MILLIONS, 1000, 0.319, 0.389),
    Point("Sync, power_sgd:4", MILLIONS, 1000, 0.319, 0.335, aside=1.18),
    Point("Sync, int8", MILLIONS, 100, 0.327, 3.356),
    Point("Sync, int4", MILLIONS, 100, 0.327, 1.891),
    Point("Sync, top_k:0.01", MILLIONS, 100, 0.327, 0.615),
    Point("Sync, power_sgd:4", MILLIONS, 100, 0.327, 0.475),
]
# "The loss of strategies and codecs" and "rounds on slow links": at a load of 28 to 39 by other work.
BUSY = [
    Point("Sync", MILLIONS, 100, 0.352, 13.672),
    Point("Sync, bf16", MILLIONS, 100, 0.352, 6.945),
    Point("Sync", 2.5, 100, 8.05 / 50, 71.7 / 50),
    Point("LocalSGD(50), DiLoCo(50)", 2.5, 100, 8.05 / 50, 10.3 / 50),
    Point(f"StreamingDiLoCo(50, delay={DELAY})", 2.5, 100, 8.05 / 50, 8.44 / 50),
]
Line = Callable[[float], float]  # the seconds of a step, of the bits/s of a link


def wire(codec: str, rate: float) -> float:
    """The seconds for what a rank sends of all parameters."""
    return TCP * 8 * sent_bytes(codec, LAYERS, WIDTH, NODES) / rate


def sync(codec: str) -> Line:
    return lambda rate: COMPUTE + least_wait(wire(codec, rate), COMPUTE * (1 - FORWARD), LAYERS)


def sharded(rate: float) -> float:
    half = wire("none", rate) / 2
    return COMPUTE + least_wait(half, COMPUTE * (1 - FORWARD), LAYERS) + half


def rounds(every: int, codec: str = "none") -> Line:
    return lambda rate: COMPUTE + wire(codec, rate) / every


def streaming(every: int) -> Line:
    """An outer step of a fragment waits for what `DELAY` steps do not hide."""
    return lambda rate: COMPUTE + max(0.0, wire("none", rate) / FRAGMENTS - DELAY * COMPUTE) * FRAGMENTS / every


def served(mode: str) -> Line:
    size = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    return lambda rate: NODES / bound(mode, 1, NODES, COMPUTE, TCP * 8 * size / rate)


PANELS: dict[str, dict[str, Line]] = {
    "an exchange in every step": {
        "Sync": sync("none"),
        "ShardedSync": sharded,
        **{f"Sync, {codec}": sync(codec) for codec in ("bf16", "int8", "int4", "top_k:0.01", "power_sgd:4")},
    },
    "rounds, and servers": {
        "ParameterServer, sync": served("sync"),
        "ParameterServer, async": served("async"),
        "Sync": sync("none"),
        "LocalSGD(10), DiLoCo(10)": rounds(10),
        "LocalSGD(50), DiLoCo(50)": rounds(50),
        f"StreamingDiLoCo(50, delay={DELAY})": streaming(50),
        "DiLoCo(50), int4": rounds(50, "int4"),
        "DiLoCo(500)": rounds(500),
        "SparseLoCo(30)": rounds(30, f"top_k:{1 / 64}:2"),
    },
}


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a PNG")
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mbits = numpy.logspace(1, 4, 121)
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.2), sharey=True)
    for axis, (title, lines) in zip(axes, PANELS.items(), strict=True):
        for index, (name, line) in enumerate(lines.items()):
            color = "black" if name == "Sync" else f"C{index}"  # it is in both panels
            style = "--" if name == "ShardedSync" else "-"  # it covers Sync
            axis.plot(mbits, [line(mbit * 1e6) for mbit in mbits], style, color=color, label=name)
            for points, filling in ((QUIET, color), (BUSY, "white")):
                own = [point for point in points if point.line == name]
                rates = [point.mbit * MILLIONS / point.millions * point.compute / COMPUTE for point in own]
                places = [rate * point.aside for rate, point in zip(rates, own, strict=True)]
                seconds = [point.seconds * COMPUTE / point.compute for point in own]
                axis.plot(places, seconds, "o", color=color, markerfacecolor=filling, markersize=5.5)
        axis.axhline(COMPUTE, color="grey", linestyle=":", linewidth=1)
        axis.set(title=title, xscale="log", yscale="log", xlim=(10, 10_000), ylim=(0.25, 250), xlabel="rate of a link")
        axis.set_xticks([10, 100, 1000, 10_000], ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s"])
        axis.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
        axis.tick_params(which="minor", left=False)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8.5)
    axes[0].set_ylabel("seconds of a step (points: measured, hollow: on a busy machine)")
    figure.tight_layout()
    figure.savefig(arguments.path, dpi=80)


if __name__ == "__main__":
    main()
