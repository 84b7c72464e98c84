"""What the benchmarks of losses share: models with their data, runs with several seeds, the table and the picture.

The models are the MLP and the CNN of examples/train.py and the small GPT of examples/train_gpt.py. A *variant* is a
name with what makes its strategy. All variants of a seed have the same samples in the same steps, the same initial
parameters and the same learning rates, those of plain training.

In the table, `training loss` is the mean over the last tenth of the steps, of all ranks. The other columns are of data
that nobody has trained with, after the last step: test loss and accuracy (MLP, CNN), validation loss (GPT). Each is the
mean over the seeds, with their standard deviation. `apart` is the mean of the differences from the first variant with
the same seed, with its interval of 95 % by Student's t.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy

import mpitrain as mt
from mpitrain.errors import NonFiniteError
from mpitrain.strategies import Strategy

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from datasets import load_images, load_text, standardised
from models import cnn, gpt, mlp
from models.layers import softmax_cross_entropy
from train_gpt import windows

# Student's t for a two-sided interval of 95 %, by the number of seeds.
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
TRAINING_LOSS = "training loss"
Make = Callable[[], Strategy]


class Task(NamedTuple):
    """How to build a training, given a World, a seed and a strategy; and how to test what it has trained."""

    build: Callable[..., mt.Parts]
    test: Callable[[mt.Trainer], dict[str, float]]


class Run(NamedTuple):
    """A training that was made: the loss of each step, and what the test found. After a divergence, NaN."""

    model: str
    steps: int
    ranks: int
    seed: int
    variant: str
    losses: list[float]
    tested: dict[str, float]

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells runs apart."""
        return self[:5]

    def metrics(self) -> dict[str, float]:
        """The columns of the table."""
        return {TRAINING_LOSS: float(numpy.mean(self.losses[-max(1, self.steps // 10) :])), **self.tested}


def images(model: Any, steps: int) -> Task:
    train_x, train_y, test_x, test_y = load_images("fashion")
    train_x, test_x = standardised(train_x, test_x)

    def build(world: mt.World, seed: int, strategy: Make) -> mt.Parts:
        parameters = model.initial(numpy.random.default_rng(seed), numpy, inputs=784)
        schedule = mt.optim.warmup_cosine(0.05, warmup_steps=steps // 10, total_steps=steps)
        optimizer = mt.optim.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=5e-4)
        data = mt.data.ArrayData(world, (train_x, train_y), global_batch=128, seed=seed)
        return mt.Parts(mt.ArrayFunction(model.loss_and_gradients, parameters, optimizer), strategy(), data)

    def test(trainer: mt.Trainer) -> dict[str, float]:
        parameters = trainer.adapter.parameters()

        def metrics(batch: Any) -> dict[str, float]:
            x, y = batch
            logits = model.scores(parameters, x)
            loss, _ = softmax_cross_entropy(logits, y)
            return {"test loss": float(loss), "accuracy": float((logits.argmax(axis=1) == y).mean())}

        return mt.evaluate(trainer.world, metrics, (test_x, test_y))

    return Task(build, test)


def text(steps: int, context: int) -> Task:
    train, validation, vocabulary = load_text("austen")
    some = [part[:500] for part in windows(validation, context)]

    def build(world: mt.World, seed: int, strategy: Make) -> mt.Parts:
        sizes = {"vocabulary": len(vocabulary), "context": context, "width": 96, "heads": 4, "layers": 2}
        parameters = gpt.initial(numpy.random.default_rng(seed), numpy, **sizes)
        schedule = mt.optim.warmup_cosine(4e-3, warmup_steps=steps // 10, total_steps=steps)
        optimizer = mt.optim.AdamW(schedule, betas=(0.9, 0.99), weight_decay=0.1, clip_norm=1.0)
        data = mt.data.ArrayData(world, windows(train, context), global_batch=16, seed=seed)
        return mt.Parts(mt.ArrayFunction(gpt.loss_and_gradients, parameters, optimizer), strategy(), data)

    def test(trainer: mt.Trainer) -> dict[str, float]:
        parameters = trainer.adapter.parameters()

        def loss(batch: Any) -> dict[str, float]:
            return {"validation loss": gpt.loss_and_gradients(parameters, batch, lambda name, gradient: None)}

        return mt.evaluate(trainer.world, loss, some, samples_at_once=100)

    return Task(build, test)


TASKS: dict[str, Callable[[int], Task]] = {
    "mlp": partial(images, mlp),
    "cnn": partial(images, cnn),
    "gpt": partial(text, context=64),
    "gpt-32": partial(text, context=32),  # half of the work of a step
}


class Losses(mt.Hook):
    """The losses of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
        self.values.append(step.loss)


def add_arguments(parser: argparse.ArgumentParser, models: Sequence[str], steps: Sequence[int]) -> None:
    """The options of `study`, and of what shows its runs."""
    parser.add_argument("--models", nargs="*", choices=TASKS, default=models)
    parser.add_argument("--steps", type=int, nargs="*", default=steps, help="of each model")
    parser.add_argument("--seeds", type=int, choices=range(1, 11), default=5)
    parser.add_argument("--results", type=Path, help="a file of JSON lines: runs in it are not made again")
    parser.add_argument("--plot", type=Path, help="write a PNG: the loss over the steps, mean and range of the seeds")


def study(world: mt.World, arguments: argparse.Namespace, variants: Mapping[str, Make]) -> Iterator[list[Run]]:
    """Make the runs that are not in the file of results yet; yield those of a model. Collective."""
    path: Path | None = arguments.results
    lines = world.broadcast_object(path.read_text().splitlines() if world.is_root and path and path.exists() else [])
    made = {run.key: run for run in (Run(**json.loads(line)) for line in lines)}
    for model, steps in zip(arguments.models, arguments.steps, strict=True):
        task, runs = TASKS[model](steps), []
        for seed in range(arguments.seeds):
            for variant, strategy in variants.items():
                run = made.get((model, steps, world.size, seed, variant))
                if run is None:
                    began = time.monotonic()
                    build = partial(task.build, seed=seed, strategy=strategy)
                    run = Run(model, steps, world.size, seed, variant, *_train(build, task.test, steps))
                    if world.is_root and path:
                        with path.open("a") as file:
                            file.write(json.dumps(run._asdict()) + "\n")
                    if world.is_root:
                        found = ", ".join(f"{name} {value:.4f}" for name, value in run.metrics().items())
                        seconds, load = time.monotonic() - began, os.getloadavg()[0]
                        print(f"# {model} {seed} {variant}: {found}; {seconds:.0f} s, load {load:.0f}", flush=True)
                runs.append(run)
        yield runs


def _train(build: Callable[..., mt.Parts], test: Callable[[mt.Trainer], dict[str, float]], steps: int) -> Any:
    hook = Losses()
    trainer = mt.Trainer(build, [mt.StopAtStep(steps), hook])
    try:
        trainer.run()
        tested = test(trainer)
    except NonFiniteError:  # on every rank
        hook.values += [float("nan")] * (steps - len(hook.values))
        tested = dict.fromkeys(test(trainer), float("nan"))
    trainer.close()
    return hook.values, tested


def by_variant(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each variant, in the order of their seeds."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.variant, []).append(run)
    return found


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its interval of 95 %; infinite for one value."""
    count = len(differences)
    half = T95[count] * statistics.stdev(differences) / count**0.5 if count > 1 else float("inf")
    return statistics.fmean(differences), half


def table(runs: Sequence[Run]) -> str:
    """The runs of a model as a table; the first variant is what the others are compared with."""
    variants = by_variant(runs)
    base = [run.metrics() for run in next(iter(variants.values()))]
    lines = [
        f"| variant | {' | '.join(f'{name} | apart' for name in base[0])} |",
        "| --- " * (1 + 2 * len(base[0])) + "|",
    ]
    for variant, its in variants.items():
        cells = []
        for name in base[0]:
            values = [run.metrics()[name] for run in its]
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            apart, half = interval([value - other[name] for value, other in zip(values, base, strict=True)])
            cells += [f"{statistics.fmean(values):.4f} ± {deviation:.4f}", f"{apart:+.4f} ± {half:.4f}"]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(runs: Sequence[Run]) -> dict[str, numpy.ndarray]:
    """The losses of each variant, by seed and step."""
    return {variant: numpy.array([run.losses for run in its]) for variant, its in by_variant(runs).items()}


def plot(panels: Mapping[str, Mapping[str, numpy.ndarray]], path: Path) -> None:
    """Draw losses by seed and step: a panel for each title, a line for each name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = pyplot.figure(figsize=(5 * columns, 3.6 * rows))
    for number, (title, losses) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(rows, columns, number)
        for name, values in losses.items():
            window = max(1, values.shape[1] // 20)
            smooth = numpy.array([numpy.convolve(line, numpy.ones(window) / window, "valid") for line in values])
            at = numpy.arange(window, values.shape[1] + 1)
            (line,) = axis.plot(at, smooth.mean(axis=0), label=name, linewidth=1)
            axis.fill_between(at, smooth.min(axis=0), smooth.max(axis=0), color=line.get_color(), alpha=0.15)
        axis.set(title=title, xlabel="step", ylabel=f"training loss, mean of {window} steps", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
