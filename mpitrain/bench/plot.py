"""The picture of a sweep. The only module that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpitrain.bench.table import Row


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Plot time and bus bandwidth over size, in a row for each operation and dtype. Only rank 0 calls this."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys((row.operation, row.dtype) for row in rows))
    figure = Figure(figsize=(12, 4.2 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    grid = figure.subplots(len(groups), 2, squeeze=False)
    for (operation, dtype), (times, bandwidths) in zip(groups, grid, strict=True):
        group = [row for row in rows if (row.operation, row.dtype) == (operation, dtype)]
        for algorithm, codec in dict.fromkeys((row.algorithm, row.codec) for row in group):
            line = sorted(
                (row for row in group if (row.algorithm, row.codec) == (algorithm, codec)),
                key=lambda row: row.size_bytes,
            )
            sizes = [row.size_bytes for row in line]
            label = algorithm if codec == "none" else f"{algorithm} {codec}"
            (drawn,) = times.plot(sizes, [row.time_us for row in line], marker="o", label=label)
            times.fill_between(
                sizes, [row.p10_us for row in line], [row.p90_us for row in line], alpha=0.2, color=drawn.get_color()
            )
            bandwidths.plot(sizes, [row.busbw for row in line], marker="o", label=label)
        bounds = sorted({(row.size_bytes, row.bound_us) for row in group if row.bound_us is not None})
        if bounds:
            times.plot(*zip(*bounds, strict=True), "k--", linewidth=1, label="bound of the link")
        times.set(yscale="log", ylabel="time (us), p10 to p90", title=f"{operation} {dtype}")
        bandwidths.set(ylim=(0, None), ylabel="busbw (GB/s)", title=f"{operation} {dtype}")
        for axes in (times, bandwidths):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("size (bytes)")
            axes.xaxis.set_major_formatter(lambda value, _: size_text(value))
            axes.grid(True, alpha=0.3)
            axes.legend()
    figure.savefig(path, dpi=110)


def size_text(size: float) -> str:
    """Format 4096 as 4K, as --sizes accepts it."""
    for unit, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if size >= unit:
            return f"{size / unit:g}{letter}"
    return f"{size:g}"
