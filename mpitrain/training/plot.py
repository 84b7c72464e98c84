"""Plots of runs. The only module of training that imports matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.extras import missing
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.json_lines import RESUMED_AFTER
from mpitrain.training.writers.writer import OUTER_STEPS

# The position of a row in the run; these names are not drawn as curves. The last two are drawn as vertical lines.
_PLACES = {"step", "epoch", "samples", "seconds", "copy_steps", OUTER_STEPS, RESUMED_AFTER}
_SHARE, _SHARE_OF_WORKERS = "communication_share", "waiting_share"
# The colours of the lines of events, by RunEvent.source, and their texts in the legend.
_COLORS = {"ranks": "tab:red", "memory": "tab:purple", "disk": "tab:brown", "auto": "tab:green", "told": "tab:blue"}
_OTHER_COLOR = "tab:gray"  # of an event of a newer mpitrain
_SAID = {"auto": "changed by itself", "told": "told"}
MOST_TEXTS = 8  # of events, in the picture
_MOST_LETTERS = 40  # of a text, beside its line
FORMATS = (".png", ".svg", ".pdf")
_STYLES = ("-", "--", ":", "-.")  # of the metrics in a panel, where each run has a colour
_OWN_COLORS = 10  # of Matplotlib
_MOST_OUTER_STEPS = 40  # more lines would hide the curves


@dataclass(frozen=True)
class PlottedRun:
    """The data of a run to be drawn.

    Attributes:
        name: in the legend.
        rows: of the record, at least one.
        events: of the record.
    """

    name: str
    rows: Sequence[Mapping[str, float]]
    events: Sequence[RunEvent] = ()


def plot(path: Path, runs: Sequence[PlottedRun], title: str, metrics: Sequence[str] = ()) -> None:
    """Plot loss, throughput, the share of waiting and every other metric over the steps.

    For a single run, a dashed line marks each step after which it resumed, or after which the training continued after
    a fault. The last `MOST_TEXTS` events are labelled. A dotted line marks each row with outer steps, unless there are
    too many. If there are several runs, each has one colour in all panels.

    Args:
        path: the file of the picture, whose ending is one of `FORMATS`; it is overwritten.
        runs: one or more. The picture names which of the first three metrics they lack.
        title: the text above the picture.
        metrics: only these; empty: all.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import PercentFormatter
    except ImportError as error:
        raise missing("the picture", "matplotlib", "plot", error) from None

    panels = _panels([row for run in runs for row in run.rows], metrics)
    columns = 1 if len(panels) <= 4 else 2
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(9 if columns == 1 else 14, 3 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_literal(title), fontsize="medium")
    places = figure.subplots(lines, columns, sharex=True, squeeze=False).T.ravel()
    for axes, (label, names) in zip(places, panels.items(), strict=False):
        is_empty = not (_draw_one(axes, runs[0], names) if len(runs) == 1 else _draw_all(axes, runs, names))
        if len(runs) == 1:
            _mark_steps(axes, runs[0].rows)
            _mark(axes, runs[0].events, has_texts=axes is places[0])
        alone = len(names) == 1 and label == names[0].rpartition(" ")[2]
        axes.set(ylabel=_literal((names[0] if alone else label).replace("_", " ")))
        if names in ([_SHARE], [_SHARE_OF_WORKERS]):
            axes.set(ylim=(0, 1))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        elif label.endswith("/s"):
            axes.set(ylim=(0, None))
        axes.grid(True, alpha=0.3)
        if is_empty:
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center")
        elif len(axes.get_legend_handles_labels()[0]) > (len(runs) == 1):
            # Above the axes, where there are no curves.
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize="small")
        axes.tick_params(labelbottom=True)
    for axes in places[len(panels) :]:
        axes.remove()
    if len(runs) > 1:
        handles = [Line2D([], [], color=color) for color in _colors(len(runs))]
        names = [_literal(run.name) for run in runs]
        figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize="small")
    figure.supxlabel("step", fontsize="medium")
    figure.savefig(path, dpi=110, format=path.suffix[1:].lower())


def metrics_of(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the metrics that can be drawn, in the order of their first rows."""
    return list(dict.fromkeys(name for row in rows for name in row if name not in _PLACES))


def _panels(rows: Sequence[Mapping[str, float]], metrics: Sequence[str]) -> dict[str, list[str]]:
    """Return the metrics that share a panel, by the label of its axis.

    A metric of an evaluation shares the panel of the same metric in training, to compare "test loss" with "loss".
    """
    names = metrics_of(rows)
    if metrics:
        panels: dict[str, list[str]] = {}
        for name in metrics:
            label = "samples/s" if name == "samples_per_second" else name.rpartition(" ")[2]
            panels.setdefault(label, []).append(name)
        return panels
    speed = "tokens_per_second" if "tokens_per_second" in names else "samples_per_second"
    panels = {"loss": ["loss"] if "loss" in names else [], f"{speed.partition('_')[0]}/s": [speed]}
    waiting = _SHARE_OF_WORKERS if _SHARE_OF_WORKERS in names else _SHARE
    panels["waiting for a job" if waiting == _SHARE_OF_WORKERS else "waiting for the exchange"] = [waiting]
    for name in names:
        if name not in ("loss", speed, waiting):
            panels.setdefault(name.rpartition(" ")[2], []).append(name)
    return panels


def _outer_steps(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the steps of the rows with outer steps. A run that resumes counts them from 0."""
    counts = [row.get(OUTER_STEPS, 0.0) for row in rows]
    return [
        row["step"]
        for row, before, count in zip(rows, [0.0, *counts], counts, strict=False)
        if count and count != before
    ]


def _mark(axes: Any, events: Sequence[RunEvent], *, has_texts: bool) -> None:
    """Draw a line for each event. The legend counts the events of each source."""
    known = [source for source in _COLORS if any(event.source == source for event in events)]
    for source in dict.fromkeys([*known, *(event.source for event in events)]):
        steps = [event.after_step for event in events if event.source == source]
        for step in steps:
            said = _SAID.get(source, f"continued, from {source}" if source in _COLORS else f"event {source!r}")
            label = _literal(f"{said}: {len(steps)}") if step == steps[0] else None
            axes.axvline(step, color=_COLORS.get(source, _OTHER_COLOR), linestyle="--", linewidth=1, label=label)
    for event in events[-MOST_TEXTS:] if has_texts else ():
        text = _literal(f" {event.text}" if event.source in _SAID else f" {event.text}, {event.seconds:.2g} s")
        place = {"xycoords": axes.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": "bottom"}
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}  # to be read on curves
        color = _COLORS.get(event.source, _OTHER_COLOR)
        axes.annotate(
            text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…",
            (event.after_step, 0),
            fontsize="x-small",
            color=color,
            bbox=ground,
            **place,
        )


def _mark_steps(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    """Draw a line where a run has resumed, and where it has made outer steps."""
    resumed, outer = [row[RESUMED_AFTER] for row in rows if RESUMED_AFTER in row], _outer_steps(rows)
    for step in resumed:
        label_once = "resumed" if step == resumed[0] else None
        axes.axvline(step, color="gray", linestyle="--", linewidth=1, label=label_once)
    for step in outer if len(outer) <= _MOST_OUTER_STEPS else ():
        label_once = f"outer steps: {len(outer)}" if step == outer[0] else None
        axes.axvline(step, color="silver", linestyle=":", linewidth=1, zorder=0, label=label_once)


def _draw_one(axes: Any, run: PlottedRun, names: Sequence[str]) -> bool:
    """Draw the metrics of a run. Return whether there was one.

    Those of the training have a colour in all panels, and those of each evaluation another one.
    """
    sources = list(dict.fromkeys(_source(name) for name in metrics_of(run.rows)))
    for name in names:
        if _source(name) in sources:
            color = f"C{sources.index(_source(name))}"
            _draw(axes, run.rows, name, color=color, label=_literal(name.replace("_", " ")))
    return bool(axes.lines)


def _source(name: str) -> str:
    """Return of what a metric is: "test" of "test loss"; "" of the training."""
    return name.rpartition(" ")[0]


def _draw_all(axes: Any, runs: Sequence[PlottedRun], names: Sequence[str]) -> bool:
    """Draw the metrics of several runs: a colour for each run, and a style of line for each metric."""
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        for name, style in zip(names, itertools.cycle(_STYLES), strict=False):
            _draw(axes, run.rows, name, color=color, linestyle=style)
    has_curves = bool(axes.lines)
    for name, style in zip(names if len(names) > 1 else (), itertools.cycle(_STYLES), strict=False):
        axes.plot([], [], color="black", linestyle=style, label=_literal(name.replace("_", " ")))
    return has_curves


def _draw(axes: Any, rows: Sequence[Mapping[str, float]], name: str, **how: Any) -> None:
    if points := [(row["step"], row[name]) for row in rows if name in row]:
        axes.plot(*zip(*points, strict=True), marker="o" if len(points) <= 30 else "", **how)


def _colors(count: int) -> list[Any]:
    """Return distinct colours: Matplotlib's own ten, or more from a colour map."""
    if count <= _OWN_COLORS:
        return [f"C{number}" for number in range(count)]
    from matplotlib import colormaps

    return [colormaps["turbo"](number / (count - 1)) for number in range(count)]


def _literal(text: str) -> str:
    """Return the text escaped: Matplotlib renders text between dollars as mathematics, and refuses lone surrogates."""
    return text.encode(errors="replace").decode().replace("$", r"\$")
