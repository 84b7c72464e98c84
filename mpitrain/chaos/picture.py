"""The picture of a job under chaos. The only module of chaos that imports matplotlib."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

from mpitrain.chaos.episode import Episode
from mpitrain.chaos.plan import KINDS
from mpitrain.chaos.timeline import rate
from mpitrain.extras import missing

_MOST_BARS = 240
_MARKERS = dict(zip(KINDS, "oshDv", strict=True))
_COLOURS = dict(zip(KINDS, ("tab:red", "tab:blue", "tab:orange", "tab:purple", "tab:brown"), strict=True))


def draw(path: Path, episode: Episode, title: str) -> None:
    """Draw new steps per second over time, with a mark for each fault; below, how long the job took to go on.

    Args:
        path: of the picture; overwritten.
        episode: with at least two points.
        title: above it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("the picture", "matplotlib", "plot", error) from None

    end = episode.points[-1].seconds
    width = max(1.0, end / _MOST_BARS)
    edges = [width * number for number in range(int(end / width) + 1)] + [end]
    speeds = [_speed(episode, left, right) for left, right in pairwise(edges)]
    unit, scale = ("minutes", 60.0) if end > 300 else ("seconds", 1.0)
    made = [hit for hit in episode.hits if not hit.why_not]

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    speed, times = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    speed.stairs(speeds, [edge / scale for edge in edges], fill=True, color="tab:green", alpha=0.35)
    if made and (undisturbed := rate(episode.points, 0.0, made[0].seconds)):
        speed.axhline(undisturbed, color="tab:green", linestyle="--", linewidth=1, label="before the first fault")
    for kind in dict.fromkeys(hit.fault.kind for hit in made):
        of_kind = [hit for hit in made if hit.fault.kind == kind]
        for hit in of_kind:
            speed.axvline(hit.seconds / scale, color=_COLOURS[kind], linewidth=0.8, alpha=0.6)
        style = {"color": _COLOURS[kind], "marker": _MARKERS[kind], "linestyle": ""}
        top = [1.0] * len(of_kind)
        speed.plot(
            [hit.seconds / scale for hit in of_kind], top, transform=speed.get_xaxis_transform(),
            clip_on=False, label=f"{kind} ({len(of_kind)})", **style,
        )  # fmt: skip
        went_on = [(hit.seconds / scale, hit.went_on.seconds) for hit in of_kind if hit.went_on is not None]
        if went_on:
            times.plot(*zip(*went_on, strict=True), **style)
    speed.set(ylabel="new steps/s", ylim=(0, None), xlim=(0, max(end, 1e-3) / scale))
    speed.legend(loc="lower left", bbox_to_anchor=(0, 1.03), ncols=6, frameon=False, fontsize="small")
    times.set(ylabel="went on after (s)", xlabel=unit)
    if taken := [hit.went_on.seconds for hit in made if hit.went_on is not None]:
        # Whole decades, so that no label is between two of them.
        decades = math.floor(math.log10(min(taken))), math.floor(math.log10(max(taken))) + 1
        times.set(yscale="log", ylim=[10.0**decade for decade in decades])
        times.yaxis.set_major_formatter("{x:g}")
        times.yaxis.set_minor_formatter("")
    for axes in (speed, times):
        axes.grid(True, alpha=0.3)
    figure.savefig(path, dpi=110, format="png")


def _speed(episode: Episode, left: float, right: float) -> float:
    """Return the new steps per second in a part of the time."""
    tops = [0, 0]
    for point in episode.points:
        if point.seconds <= left:
            tops[0] = max(tops[0], point.step)
        if point.seconds <= right:
            tops[1] = max(tops[1], point.step)
    tops[0] = tops[0] or episode.points[0].step
    return (tops[1] - tops[0]) / (right - left) if right > left else 0.0
