"""The report: a table for users, rows with all digits, answers in words, and a line chart."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mpitrain.errors import MpitrainError
from mpitrain.extras import missing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Row = TypeVar("_Row", bound="DataclassInstance")

# A pipe has no width, and a table that is cut there is of no use.
_PIPE_COLUMNS = 130

# x, and lowest, mean and highest y of the seeds.
Point = tuple[float, float, float, float]

IDEAL = "ideal"


@dataclass(frozen=True)
class Panel:
    """A part of a picture.

    Attributes:
        label: of the y axis.
        lines: the points of each line by its name. A line whose name begins with IDEAL is dashed.
        log_base: of the y axis; 0: it is linear, from 0.
        title: above the panel.
    """

    label: str
    lines: Mapping[str, Sequence[Point]]
    log_base: int = 0
    title: str = ""


@dataclass(frozen=True)
class SimulationReport:
    """The result of a simulation.

    Attributes:
        columns: of the table; those of texts begin with "<".
        cells: of the table.
        rows: the same with all digits.
        answers: sentences.
        x_label, panels: of the picture.
        title: of the picture; "": that of the table.
    """

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    rows: Sequence[Mapping[str, Any]]
    answers: Sequence[str]
    x_label: str
    panels: Sequence[Panel]
    title: str = ""

    def print(self, title: str) -> None:
        """Print the table and the answers."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
        table = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False)
        for column in self.columns:
            table.add_column(column.lstrip("<"), justify="left" if column.startswith("<") else "right")
        for row in self.cells:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        for answer in self.answers:
            print(answer)

    def write_json(self, path: Path, machines: str, settings: Mapping[str, Any]) -> None:
        """Write an object with "machines" (where the numbers come from), "settings", "rows" and "answers".

        Raises:
            MpitrainError: the file cannot be written.
        """
        content = {
            "machines": machines, "settings": dict(settings), "rows": list(self.rows), "answers": list(self.answers),
        }  # fmt: skip
        try:
            path.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise MpitrainError(f"cannot write {path}: {error}") from None


def report_of(
    rows: Sequence[_Row],
    columns: Mapping[str, Callable[[_Row], str]],
    answers: Sequence[str],
    x_label: str,
    panels: Sequence[Panel],
) -> SimulationReport:
    """Make a report of dataclasses. `columns`: what the table shows of each, by title. For the others see there."""
    cells = [[text(row) for text in columns.values()] for row in rows]
    return SimulationReport(tuple(columns), cells, [asdict(row) for row in rows], answers, x_label, panels)


def shown_seconds(seconds: float) -> str:
    """A time with three digits."""
    for least, scale, name in ((2 * 86400, 86400, "d"), (7200, 3600, "h"), (1, 1, "s"), (1e-3, 1e-3, "ms")):
        if seconds >= least:
            value = seconds / scale
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def need_matplotlib() -> None:
    """Raise ConfigError if no picture can be drawn, so that a user hears of it before anything is measured."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401 - both are what draw() needs
    except ImportError as error:
        raise missing("the picture", "matplotlib", "plot", error) from None


def draw(
    path: Path,
    title: str,
    x_label: str,
    grid: Sequence[Sequence[Panel]],
    x_text: Callable[[float], str] = lambda value: f"{value:g}",
) -> None:
    """Draw panels: lines, each with a band from its lowest to its highest points, and one legend below them.

    A name has one colour in all panels. A line whose name begins with IDEAL is black and dashed.

    Args:
        path: of the picture; overwritten.
        title: above it.
        x_label: of every panel.
        grid: rows of as many panels each.
        x_text: writes a number at the x axis.

    Raises:
        MpitrainError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(grid[0]), 4.2 * len(grid)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    handles: dict[str, Any] = {}
    names = [name for panels in grid for panel in panels for name in panel.lines if not name.startswith(IDEAL)]
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(names))}
    for all_axes, panels in zip(figure.subplots(len(grid), len(grid[0]), squeeze=False), grid, strict=True):
        for axes, panel in zip(all_axes, panels, strict=True):
            for name, points in panel.lines.items():
                xs, lows, means, highs = zip(*sorted(points), strict=True)
                color = colors.get(name, "black")
                form = "--" if name.startswith(IDEAL) else "o-"
                (handles[name],) = axes.plot(xs, means, form, color=color, linewidth=1)
                axes.fill_between(xs, lows, highs, alpha=0.2, color=color)
            axes.set_xscale("log", base=2)
            axes.set(xlabel=x_label, ylabel=panel.label, title=panel.title)
            if panel.log_base:
                axes.set_yscale("log", base=panel.log_base)
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            else:
                axes.set_ylim(0, None)
            axes.xaxis.set_major_formatter(lambda value, _: x_text(value))
            axes.grid(visible=True, alpha=0.3)
    # Where no curve is.
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise MpitrainError(f"cannot write {path}: {error}") from None
