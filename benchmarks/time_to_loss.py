"""The time to a loss over slow links: the picture of README, and its table.

    python benchmarks/low_communication.py --results runs.jsonl --save 100 --rows plain int8 diloco:50 ...
    benchmarks/shaped_hosts 4 1gbit '$MPIEXEC python benchmarks/training_step.py --layers 10 --compute 0.3 --gbit 1
        --variants ddp none bf16 int8 int4 power_sgd --results steps.jsonl'            # one line; for each rate
    python benchmarks/time_to_loss.py --losses runs.jsonl --steps steps.jsonl docs/time-to-loss.png

No machine here has the cores to train a model of 10 million parameters on four hosts. So both sides are measured apart,
and put together: the held-out loss after each hundred steps, of a small GPT (low_communication.py), and the seconds of
a step of 10.5 million parameters that computes for 0.3 s, on four hosts behind links of this rate (training_step.py).

    gloo DDP         the losses of `plain`, whose gradients are equal to rounding; PyTorch's DDP over gloo, measured
    local updates    a step's computation and a part of the exchange of `none`, measured alone: 1 of H for DiLoCo.
                     Streaming DiLoCo hides its exchange where `delay` steps of computation are longer

The time to a loss is that of the first point that is at most so high, by the straight line from the point before.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Curve = list[tuple[int, float]]  # held-out loss after a step
FRAGMENTS = 4
FIRST_SHOWN = 500  # steps; the learning rate has warmed up


class Method(NamedTuple):
    """A line of the picture: the row of low_communication.py, and what training_step.py calls the exchange."""

    row: str
    exchange: str
    every: int = 1
    delay: int = 0


METHODS = {
    "gloo DDP": Method("plain", "ddp"),
    "mpitrain": Method("plain", "none"),
    "bf16": Method("bf16", "bf16"),
    "int8": Method("int8", "int8"),
    "int4": Method("int4", "int4"),
    "DiLoCo(10)": Method("diloco:10", "none", every=10),
    "DiLoCo(50)": Method("diloco:50 rate=1 momentum=0.8", "none", every=50),
    "StreamingDiLoCo(50)": Method("streaming_diloco:50 rate=1 momentum=0.8", "none", every=50, delay=1),
}


def curves(runs: list[dict[str, Any]]) -> dict[str, Curve]:
    """By row, the mean over the seeds that all rows of METHODS have."""
    by_row: dict[str, dict[int, dict[str, float]]] = {}
    for run in runs:
        if run["row"] in [method.row for method in METHODS.values()]:
            by_row.setdefault(run["row"], {})[run["seed"]] = run["tested"]
    common = sorted(set.intersection(*(set(seeds) for seeds in by_row.values())))
    print(f"seeds: {', '.join(map(str, common))}\n")
    return {
        row: [(int(step), statistics.fmean(seeds[one][step] for one in common)) for step in seeds[common[0]]]
        for row, seeds in by_row.items()
    }


def seconds_of(method: Method, steps: Mapping[str, Mapping[str, Any]]) -> float:
    """The mean of a step at this rate."""
    own = steps[method.exchange]
    if method.every == 1:
        return statistics.median(own["seconds"])
    exchange = own["alone"]
    if method.delay:
        exchange = FRAGMENTS * max(0.0, exchange / FRAGMENTS - method.delay * own["compute"])
    return float(own["compute"] + exchange / method.every)


def steps_to(curve: Curve, loss: float) -> float | None:
    """The number of steps after which the loss is at most this; None: it never is."""
    before = curve[0]
    for step, value in curve:
        if value <= loss:
            return (
                step if step == before[0] else before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
            )
        before = step, value
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=Path, required=True, help="the results of low_communication.py, one setting")
    parser.add_argument("--steps", type=Path, required=True, help="the results of training_step.py, each rate once")
    parser.add_argument("--loss", type=float, help="the loss to reach; default: the highest end of the methods")
    parser.add_argument("path", help="a PNG")
    arguments = parser.parse_args()
    known = curves([json.loads(line) for line in arguments.losses.read_text().splitlines()])
    rates: dict[float, dict[str, dict[str, Any]]] = {}
    for line in map(json.loads, arguments.steps.read_text().splitlines()):
        rates.setdefault(line["gbit"], {})[line["variant"]] = line
    methods = {name: method for name, method in METHODS.items() if method.row in known}
    loss = arguments.loss or max(known[method.row][-1][1] for method in methods.values())
    needed = {name: steps_to(known[method.row], loss) for name, method in methods.items()}
    names = {rate: f"{rate:g} Gbit/s" if rate >= 1 else f"{rate * 1000:g} Mbit/s" for rate in sorted(rates)}
    print(f"minutes to a held-out loss of {loss:.3f}, and the part of gloo DDP's\n")
    print(f"| | loss at the end | steps | {' | '.join(names.values())} |\n{'| --- ' * (3 + len(names))}|")
    for name, method in methods.items():
        cells = [f"{known[method.row][-1][1]:.3f}", "-" if needed[name] is None else f"{needed[name]:.0f}"]
        for rate in names:
            least = needed["gloo DDP"] * seconds_of(METHODS["gloo DDP"], rates[rate])
            own = None if needed[name] is None else needed[name] * seconds_of(method, rates[rate])
            cells.append("never" if own is None else f"{own / 60:.0f} ({own / least:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")
    draw(arguments.path, known, methods, {names[rate]: rates[rate] for rate in names}, loss)


def draw(
    path: str,
    known: Mapping[str, Curve],
    methods: Mapping[str, Method],
    rates: Mapping[str, Mapping[str, Mapping[str, Any]]],
    loss: float,
) -> None:
    """A panel for each rate, the slowest first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = ["black", "tab:blue", "tab:cyan", "tab:green", "tab:olive", "tab:orange", "tab:red", "tab:pink"]
    color_of = dict(zip(METHODS, colors, strict=True))
    figure, axes = pyplot.subplots(1, len(rates), figsize=(3.4 * len(rates), 3.6), sharey=True, squeeze=False)
    for axis, (rate, steps) in zip(axes[0], rates.items(), strict=True):
        for name, method in methods.items():
            curve, seconds = known[method.row], seconds_of(method, steps)
            style = "--" if name == "gloo DDP" else "-"
            axis.plot(
                [step * seconds / 60 for step, _ in curve if step >= FIRST_SHOWN],
                [one for step, one in curve if step >= FIRST_SHOWN],
                style,
                color=color_of[name],
                label=name,
            )
        axis.axhline(loss, color="grey", linestyle=":", linewidth=1)
        axis.set(title=rate, xlabel="minutes", xlim=(0, None), ylim=(None, 2.2))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out loss (nats)")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(methods), fontsize=8.5, frameon=False
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
