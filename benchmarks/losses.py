"""What benchmarks of losses share: the losses of every step, and their picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy

import mpitrain as mt


class Losses(mt.Hook):
    """The losses of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
        self.values.append(step.loss)


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
