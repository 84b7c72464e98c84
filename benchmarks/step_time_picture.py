"""Step time against the rate of the links, for strategies and codecs: the picture of docs/choosing.md.

    python benchmarks/step_time_picture.py docs/step-time.png

The lines are the least times for the bytes of docs/choosing.md: 25 million parameters in 24 equal layers and buckets,
4 nodes with one rank each, steps that compute for 0.306 s, a third of it in the forward pass, and TCP at its best. The
lines leave out what codecs compute, latency and the optimizer. The points are those of MEASURED.

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

import numpy

from servers_study import bound
from training_step import FORWARD, TCP, least_wait, sent_bytes

COMPUTE, NODES, LAYERS, WIDTH = 0.306, 4, 24, 1024
FRAGMENTS, DELAY = 4, 8
# Seconds of a step by Mbit/s, from docs/log.md, "A training step with 25 million parameters between hosts".
MEASURED = {
    "Sync": {1000: 1.387},
    "Sync, bf16": {1000: 0.764},
    "Sync, int8": {1000: 0.436},
}
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
        **{f"Sync, {codec}": sync(codec) for codec in ("bf16", "int8", "int4", "sign", "top_k:0.01", "power_sgd:4")},
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
            # Sync is in both panels, in black.
            look = {"color": "black" if name == "Sync" else f"C{index}", "linewidth": 1.5}
            axis.plot(mbits, [line(mbit * 1e6) for mbit in mbits], label=name, **look)
            points = MEASURED.get(name, {})
            axis.plot(list(points), list(points.values()), "o", color=look["color"], markeredgecolor="white")
        axis.axhline(COMPUTE, color="grey", linestyle=":", linewidth=1)
        axis.set(title=title, xscale="log", yscale="log", xlim=(10, 10_000), ylim=(0.25, 250), xlabel="rate of a link")
        axis.set_xticks([10, 100, 1000, 10_000], ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s"])
        axis.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
        axis.tick_params(which="minor", left=False)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8.5)
    axes[0].set_ylabel("seconds of a step (points: measured; dotted: the computation)")
    figure.tight_layout()
    figure.savefig(arguments.path, dpi=90)


if __name__ == "__main__":
    main()
