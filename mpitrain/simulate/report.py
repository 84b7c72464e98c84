"""What a simulation has to say: a table for people, rows with all digits, answers in words, lines of a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import MpitrainError

# A pipe has no width, and a table that is cut there is of no use.
_PIPE_COLUMNS = 130

# x, and lowest, mean and highest y of the seeds.
Point = tuple[float, float, float, float]


@dataclass(frozen=True)
class Panel:
    """A part of a picture.

    Attributes:
        label: of the y axis.
        lines: the points of each line by its name. A line whose name begins with "ideal" is dashed.
        is_log: whether the y axis is.
    """

    label: str
    lines: Mapping[str, Sequence[Point]]
    is_log: bool = False


@dataclass(frozen=True)
class SimulationReport:
    """The result of a simulation.

    Attributes:
        columns: of the table; those of texts begin with "<".
        cells: of the table.
        rows: the same with all digits.
        answers: sentences.
        x_label, panels: of the picture.
    """

    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    rows: Sequence[Mapping[str, Any]]
    answers: Sequence[str]
    x_label: str
    panels: Sequence[Panel]

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
