"""What a strategy and a codec cost in loss, beside mt.Sync with the same samples.

    mpiexec -n 4 python benchmarks/rounds_loss.py --results runs.jsonl --plot rounds-loss.png --choice choice.png

A variant of `--variants` is the name of a strategy, or a codec alone for mt.Sync with this codec. Words after the name
are a codec, and arguments of the strategy: "diloco:50" is mt.DiLoCo(50), "streaming_diloco:50 delay=8 int4" is
mt.StreamingDiLoCo(50, delay=8) which sends 4-bit numbers. `outer=0.3` is the learning rate of the outer optimizer. The
models and the columns are those of losses.py. The exchange takes every rank for a node of its own.

`--plot` draws the loss over the steps, a panel for each number of steps in a round, and one for all variants without
rounds. `--choice` draws what a variant costs in loss against the bytes of a step, for 25 million parameters of which
power_sgd sends the same part as of the model's own.
"""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import losses
import mpitrain as mt
from compression_loss import exchange_of
from mpitrain.bench.rounds import versions_line
from mpitrain.compression import power_sgd
from mpitrain.strategies import STRATEGIES, Strategy
from training_step import sent_bytes

BASE = "sync"
EVERY = (10, 50, 200)
VARIANTS = [
    *(f"{name}:{every}" for every in EVERY for name in ("local_sgd", "diloco", "streaming_diloco", "sparse_loco")),
    *("streaming_diloco:50 delay=8", "diloco:50 int4"),
    *("fp16", "int4", "top_k:0.01", "sign", "power_sgd:4"),
]


def parts(variant: str) -> tuple[str, int, str, dict[str, Any]]:
    """The name of the strategy, the steps of a round (1 without rounds), the codec, and the other arguments."""
    first, *words = variant.split()
    name, _, every = first.partition(":")
    if name not in STRATEGIES:
        name, every, words = BASE, "", [first, *words]
    named = dict(word.split("=") for word in words if "=" in word)
    (codec,) = [word for word in words if "=" not in word] or ["none"]
    return name, int(every or 1), codec, {key: ast.literal_eval(value) for key, value in named.items()}


def make(variant: str) -> Strategy:
    """The strategy of this variant."""
    name, every, codec, more = parts(variant)
    if "outer" in more:
        more["outer"] = mt.Sgd(more["outer"], momentum=0.9, nesterov=True)
    if name != BASE:
        more["sync_every"] = every
    if codec != "none" or name == BASE:
        more["exchange"] = exchange_of(codec)
    made: Strategy = STRATEGIES[name](**more)  # type: ignore[call-arg]
    return made


def sent_part(codec: str, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """The part of a model's numbers that power_sgd sends: its matrices may be smaller than those of `megabytes`."""
    made = power_sgd.plan(shapes.items(), power_sgd.rank_of(codec))
    return (made.num_first + made.num_second) / sum(math.prod(shape) for shape in shapes.values())


def megabytes(variant: str, ranks: int, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """What a rank sends in a step on average, as docs/choosing.md counts: 24 layers of 1024 x 1024.

    With power_sgd, it is the part that it sends of the model with these shapes, of as many numbers.
    """
    name, every, codec, more = parts(variant)
    if codec.startswith(power_sgd.NAME):
        return sent_bytes("none", 24, 1024, ranks) * sent_part(codec, shapes) / every / 1e6
    if name == "sparse_loco":  # it has a form of its own
        codec = f"top_k:{more.get('density', 1 / 64)}:{more.get('bits', 2)}"
    return sent_bytes(codec, 24, 1024, ranks) / every / 1e6


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    losses.add_arguments(parser, ["gpt-32", "mlp"], [400, 600])
    parser.add_argument("--variants", nargs="*", default=VARIANTS)
    parser.add_argument("--choice", type=Path, help="write a PNG: loss against bytes")
    arguments = parser.parse_args()
    world = mt.init()
    world.print(f"{world.size} ranks, as if each were on a node of its own; {versions_line('ml_dtypes', 'numba')}")
    variants = {name: lambda name=name: make(name) for name in [BASE, *arguments.variants]}
    models, shapes = [], []
    for runs in losses.study(world, arguments, variants):
        world.print(f"\n{runs[0].model}, {runs[0].steps} steps, {arguments.seeds} seeds\n\n{losses.table(runs)}")
        models.append(runs)
        built = losses.TASKS[runs[0].model](runs[0].steps).build(world, 0, mt.Sync)
        shapes.append({name: one.shape for name, one in built.adapter.parameters().items()})
    if arguments.plot and world.is_root:
        losses.plot({title: panel for runs in models for title, panel in panels(runs).items()}, arguments.plot)
    if arguments.choice and world.is_root:
        choice(models, shapes, world.size, arguments.choice)


def panels(runs: Sequence[losses.Run]) -> dict[str, dict[str, Any]]:
    """The curves of a model, by the steps of a round."""
    curves = losses.curves(runs)
    found = {}
    for every in sorted({parts(variant)[1] for variant in curves}):
        title = f"{runs[0].model}: " + ("Sync and codecs" if every == 1 else f"rounds of {every} steps")
        found[title] = {name: values for name, values in curves.items() if name == BASE or parts(name)[1] == every}
    return found


def choice(
    models: Sequence[Sequence[losses.Run]], shapes: Sequence[Mapping[str, tuple[int, ...]]], ranks: int, path: Path
) -> None:
    """Draw, for each model, how much higher the loss of new data is than with BASE, against the bytes of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(models), figsize=(6.5 * len(models), 4.8), squeeze=False)
    for axis, runs, its_shapes in zip(axes[0], models, shapes, strict=True):
        variants = losses.by_variant(runs)
        metric = next(name for name in runs[0].tested if name.endswith("loss"))
        by_line: dict[str, list[tuple[float, float, float]]] = {}
        for variant, its in variants.items():
            apart = [run.tested[metric] - base.tested[metric] for run, base in zip(its, variants[BASE], strict=True)]
            if variant != BASE:
                name, every, _, _ = parts(variant)
                line = variant.replace(f":{every}", "") if every > 1 else name
                by_line.setdefault(line, []).append((megabytes(variant, ranks, its_shapes), *losses.interval(apart)))
        for index, (line, points) in enumerate(by_line.items()):
            places, means, halves = zip(*points, strict=True)
            style = "s" if line == BASE else "o-"
            label = "codecs with sync" if line == BASE else line
            axis.errorbar(places, means, halves, fmt=style, color=f"C{index}", label=label, capsize=3, linewidth=1)
        codecs = [variant for variant in variants if variant != BASE and parts(variant)[1] == 1]
        for index, (variant, (place, mean, _)) in enumerate(zip(codecs, by_line.get(BASE, []), strict=True)):
            above_or_below = (5, -13 if index % 2 else 6)  # names of neighbours must not cover each other
            axis.annotate(variant, (place, mean), above_or_below, textcoords="offset points", fontsize=8)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set(title=f"{runs[0].model}, {runs[0].steps} steps", xscale="log", xlabel="MB that a rank sends in a step")
        axis.set_yscale("symlog", linthresh=0.05, linscale=0.6)
        axis.set_yticks([0, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2], ["0", "0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"])
        axis.set(ylabel=f"{metric}: how much higher than with sync", ylim=(-0.03, 2.5))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
