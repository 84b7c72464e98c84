"""The picture of a simulation: lines, each with a band from the lowest to the highest seed. It imports matplotlib."""

from __future__ import annotations

from pathlib import Path

from mpitrain.errors import MpitrainError
from mpitrain.extras import missing
from mpitrain.simulate.report import SimulationReport

try:  # whoever wants a picture hears of it before the simulation
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise missing("the picture", "matplotlib", "plot", error) from None


def draw(path: Path, report: SimulationReport, title: str) -> None:
    """Draw the panels of a report side by side.

    Args:
        path: of the picture; overwritten.
        title: above it.

    Raises:
        MpitrainError: the picture cannot be written.
    """
    figure = Figure(figsize=(5.5 * len(report.panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    for axes, panel in zip(figure.subplots(1, len(report.panels), squeeze=False)[0], report.panels, strict=True):
        for name, points in panel.lines.items():
            xs, lows, means, highs = zip(*sorted(points), strict=True)
            (drawn,) = axes.plot(xs, means, "k--" if name.startswith("ideal") else "o-", linewidth=1, label=name)
            axes.fill_between(xs, lows, highs, alpha=0.2, color=drawn.get_color())
        axes.set_xscale("log", base=2)
        axes.set(xlabel=report.x_label, ylabel=panel.label)
        if panel.is_log:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        else:
            axes.set_ylim(0, None)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise MpitrainError(f"cannot write {path}: {error}") from None
