"""The picture of a run. The only module of training that imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mpitrain.errors import ConfigError


def plot(path: Path, rows: Sequence[Mapping[str, float]], title: str) -> None:
    """Loss, throughput and communication share over the steps, one below the other.

    Args:
        path: of the picture; overwritten.
        rows: of a record, at least one. What they have not got is said in the picture.
        title: above it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    except ImportError as error:
        raise ConfigError(f"the picture needs matplotlib ({error}); pip install matplotlib") from None

    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    losses, speeds, shares = figure.subplots(3, 1, sharex=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    # Losses of evaluations beside the one of training: they are to be compared.
    for name in [name for name in names if name == "loss" or name.endswith(" loss")]:
        _draw(losses, rows, name)
    speed = "tokens_per_second" if "tokens_per_second" in names else "samples_per_second"
    _draw(speeds, rows, speed)
    _draw(shares, rows, "communication_share")
    losses.set(ylabel="loss")
    speeds.set(ylabel=f"{speed.partition('_')[0]}/s", ylim=(0, None))
    shares.set(ylabel="waiting for the exchange", xlabel="step", ylim=(0, 1))
    shares.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in (losses, speeds, shares):
        axes.grid(True, alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend()
        elif not axes.lines:
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center")
    figure.savefig(path, dpi=110, format="png")


def _draw(axes: object, rows: Sequence[Mapping[str, float]], name: str) -> None:
    points = [(row["step"], row[name]) for row in rows if name in row]
    if points:
        marker = "o" if len(points) <= 30 else ""
        axes.plot(*zip(*points, strict=True), marker=marker, label=name.replace("_", " "))  # type: ignore[attr-defined]
