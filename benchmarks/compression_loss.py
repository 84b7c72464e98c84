"""Does training reach the same loss when gradients are shortened on the wire?

    mpiexec -n 2 python benchmarks/compression_loss.py --plot losses.png

The MLP and the CNN of examples/train.py and the small GPT of examples/train_gpt.py, in shorter runs, each with several
seeds: gradients in full, bf16 and int8 with error feedback, and int8 without it, to show what it is for; or what
`--gradients` names (top_k:0.05, sign, power_sgd:2, "sign without feedback"), always beside `none`. The exchange
takes every rank for a node of its own, so that everything is shortened as between hosts.

`loss` is the mean over the last tenth of the steps, `test` is the accuracy (MLP, CNN) or the validation loss (GPT);
both as mean over the seeds, and their standard deviation. `apart` is the mean of the differences from `none` with the
same seed: the same samples and the same initial parameters.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy

import mpitrain as mt
from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.bench.rounds import versions_line
from mpitrain.exchange.exchange import CompressedExchange, Exchange, make_exchange
from mpitrain.exchange.slot import Slot

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from datasets import load_images, load_text
from models import cnn, gpt, mlp
from train import standardised
from train_gpt import windows


class Forgetful(CompressedExchange):
    """Drops what the codec leaves out."""

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        slot.residual[part] = 0
        return super().mean(slot, part, share)


def as_nodes(world: mt.World) -> mt.World:
    return replace(world, node_ranks=tuple(range(world.size)))


_WITHOUT = " without feedback"


def exchange_of(name: str) -> Callable[[mt.World], Exchange]:
    """The exchange for a compression; "NAME without feedback" is for codecs only."""
    if name.endswith(_WITHOUT):
        return lambda world: Forgetful(as_nodes(world), name.removesuffix(_WITHOUT))
    return lambda world: make_exchange(as_nodes(world), compression=name)


def images(model: Any, steps: int) -> tuple[str, Callable[..., mt.Parts], Callable[[mt.Trainer], float]]:
    train_x, train_y, test_x, test_y = load_images("fashion")
    train_x, test_x = standardised(train_x, test_x)

    def build(world: mt.World, seed: int, exchange: Callable[[mt.World], Exchange]) -> mt.Parts:
        parameters = model.initial(numpy.random.default_rng(seed), numpy, inputs=784)
        schedule = mt.warmup_cosine(0.05, warmup_steps=steps // 10, total_steps=steps)
        optimizer = mt.Sgd(schedule, momentum=0.9, nesterov=True, weight_decay=5e-4)
        data = mt.ArrayData(world, (train_x, train_y), global_batch=128, seed=seed)
        return mt.Parts(mt.ArrayFunction(model.loss_and_gradients, parameters, optimizer), mt.Sync(exchange), data)

    def test(trainer: mt.Trainer) -> float:
        parameters = trainer.adapter.parameters()

        def right(batch: Any) -> dict[str, float]:
            return {"right": float((model.scores(parameters, batch[0]).argmax(axis=1) == batch[1]).mean())}

        return mt.evaluate(trainer.world, right, (test_x, test_y))["right"]

    return "accuracy", build, test


def text(steps: int) -> tuple[str, Callable[..., mt.Parts], Callable[[mt.Trainer], float]]:
    train, validation, vocabulary = load_text("austen")
    some = [part[:500] for part in windows(validation, 64)]

    def build(world: mt.World, seed: int, exchange: Callable[[mt.World], Exchange]) -> mt.Parts:
        sizes = {"vocabulary": len(vocabulary), "context": 64, "width": 96, "heads": 4, "layers": 2}
        parameters = gpt.initial(numpy.random.default_rng(seed), numpy, **sizes)
        schedule = mt.warmup_cosine(4e-3, warmup_steps=steps // 10, total_steps=steps)
        optimizer = mt.AdamW(schedule, betas=(0.9, 0.99), weight_decay=0.1, clip_norm=1.0)
        data = mt.ArrayData(world, windows(train, 64), global_batch=16, seed=seed)
        return mt.Parts(mt.ArrayFunction(gpt.loss_and_gradients, parameters, optimizer), mt.Sync(exchange), data)

    def test(trainer: mt.Trainer) -> float:
        parameters = trainer.adapter.parameters()

        def loss(batch: Any) -> dict[str, float]:
            return {"loss": gpt.loss_and_gradients(parameters, batch, lambda name, gradient: None)}

        return mt.evaluate(trainer.world, loss, some, samples_at_once=100)["loss"]

    return "validation loss", build, test


class Losses(mt.Hook):
    """The losses of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
        self.values.append(step.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=("mlp", "cnn", "gpt"), default=["mlp", "gpt"])
    parser.add_argument("--steps", type=int, nargs="*", default=[938, 200], help="of each model")
    parser.add_argument("--gradients", nargs="*", default=["none", "bf16", "int8", "int8 without feedback"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="write a PNG: the loss over the steps, mean and range of the seeds")
    arguments = parser.parse_args()
    exchanges = {name: exchange_of(name) for name in ["none", *arguments.gradients]}
    world = mt.init()
    world.print(f"{world.size} ranks, as if each were on a node of its own; {versions_line('ml_dtypes', 'numba')}")
    curves: dict[str, dict[str, numpy.ndarray]] = {}
    for model, steps in zip(arguments.models, arguments.steps, strict=True):
        unit, build, test = text(steps) if model == "gpt" else images({"mlp": mlp, "cnn": cnn}[model], steps)
        losses: dict[str, list[list[float]]] = {name: [] for name in exchanges}
        tested: dict[str, list[float]] = {name: [] for name in exchanges}
        for seed in range(arguments.seeds):
            for name, exchange in exchanges.items():
                hook = Losses()
                trainer = mt.Trainer(partial(build, seed=seed, exchange=exchange), [mt.StopAtStep(steps), hook])
                trainer.run()
                losses[name].append(hook.values)
                tested[name].append(test(trainer))
        curves[model] = {name: numpy.array(values) for name, values in losses.items()}
        last = {name: array[:, -max(1, steps // 10) :].mean(axis=1) for name, array in curves[model].items()}
        world.print(f"\n{model}, {steps} steps, {arguments.seeds} seeds\n")
        world.print(f"| gradients | loss | apart | {unit} | apart |\n| --- | --- | --- | --- | --- |")
        for name in exchanges:
            cells = []
            for values, base in ((last[name], last["none"]), (numpy.array(tested[name]), numpy.array(tested["none"]))):
                deviation = statistics.stdev(values) if len(values) > 1 else 0.0
                cells += [f"{values.mean():.4f} ± {deviation:.4f}", f"{(values - base).mean():+.4f}"]
            world.print(f"| {name} | {' | '.join(cells)} |")
    if arguments.plot and world.is_root:
        plot(curves, arguments.plot)


def plot(curves: dict[str, dict[str, numpy.ndarray]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 3.6), squeeze=False)
    for axis, (model, losses) in zip(axes[0], curves.items(), strict=True):
        for name, values in losses.items():
            window = max(1, values.shape[1] // 20)
            smooth = numpy.array([numpy.convolve(line, numpy.ones(window) / window, "valid") for line in values])
            at = numpy.arange(window, values.shape[1] + 1)
            (line,) = axis.plot(at, smooth.mean(axis=0), label=name, linewidth=1)
            axis.fill_between(at, smooth.min(axis=0), smooth.max(axis=0), color=line.get_color(), alpha=0.15)
        axis.set(title=model, xlabel="step", ylabel=f"training loss, mean of {window} steps", yscale="log")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
