"""What chaos did to a job, and how the job continued: as numbers, as text and as a picture. Functions of an Episode."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpitrain.extras import missing
from testbed.chaos.episode import Episode, Hit, kept, rate, samples_per_second
from testbed.chaos.plan import KINDS

# An undisturbed rate of less than this may be chance.
_LEAST_SECONDS = 2.0
_MOST_NAMED = 90


def numbers(episode: Episode, job: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report as values for JSON; `options` are those that chaos ran with."""
    made = [hit for hit in episode.hits if not hit.why_not]
    share, share_of_capacity = kept(episode.points, [hit.seconds for hit in made])
    steps = [point.step for point in episode.points]
    first = made[0].seconds if made else episode.seconds
    return {
        "job": job,
        **options,
        "seconds": round(episode.seconds, 1),
        "steps": [steps[0], max(steps)] if steps else [],
        "undisturbed_seconds": round(first, 1),
        "undisturbed_steps_per_second": round(rate(episode.points, 0.0, first), 3),
        "throughput_kept": round(share, 4),
        "throughput_kept_of_capacity": round(share_of_capacity, 4),
        "output_was_read": episode.hears,
        "faults": [_fault(episode, hit) for hit in episode.hits],
        "kinds": {kind: _kind(episode, [hit for hit in made if hit.fault.kind == kind]) for kind in _kinds(made)},
        "news": [f"{seconds:.1f} s  {line}" for seconds, line in episode.news],
        "has_ended": episode.has_ended,
        "unseen": episode.unseen,
        "last_said": episode.said[-1][1] if episode.said else "",
        "error": episode.error,
        "left": episode.left,
    }


def is_good(episode: Episode) -> bool:
    """Return whether the job has ended well, and nothing of it is left."""
    return episode.has_ended and not episode.error and not any(episode.left.values())


def text(report: Mapping[str, Any]) -> str:
    """Return the report for people."""
    lines = [f"chaos in job {report['job']}", ""]
    header = ("", "AT", "FAULT", "ON", "WHAT", "CONTINUED AFTER", "STEPS/S BEFORE", "NAMED")
    rows = [header, *(_row(fault) for fault in report["faults"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append("")
    for kind, summary in report["kinds"].items():
        named = ""
        if report["output_was_read"] and summary["to_name"]:
            named = f", named {summary['named']} of {summary['to_name']}"
        times = ""
        if summary["median_seconds"] is not None:
            times = f": median {summary['median_seconds']:.2f} s, worst {summary['worst_seconds']:.2f} s"
        lines.append(f"{kind}: the job continued after {summary['went_on']} of {summary['count']}{times}{named}")
    if not report["output_was_read"]:
        lines.append("culprits: not known, because the launcher's stderr is not a file; start the job with `2> FILE`")
    if report["faults"] and report["steps"]:
        first, last = report["steps"]
        before = report["undisturbed_seconds"]
        unsure = ", too short for a sure rate" if before < _LEAST_SECONDS else ""
        lines.append(
            f"throughput: {last - first} steps in {report['seconds']:.0f} s; "
            f"{report['undisturbed_steps_per_second']:.2f} steps/s in the {before:.0f} s before the first fault{unsure}"
            f"; kept: {report['throughput_kept']:.1%}, or {report['throughput_kept_of_capacity']:.1%} "
            "of what the remaining ranks could do"
        )
    if report["news"]:
        lines += ["connections:", *(f"    {line}" for line in report["news"])]
    if not report["has_ended"]:
        lines.append("the job continues; all faults are undone")
    else:
        lines.append(_verdict(report))
        left = [f"{host}: {line}" for host, lines_there in report["left"].items() for line in lines_there]
        lines.append("left behind: nothing" if not left else "left behind:")
        lines += [f"    {line}" for line in left]
    return "\n".join(lines) + "\n"


def _verdict(report: Mapping[str, Any]) -> str:
    """Say how the job ended. Hosts that were not seen may have had ranks of a later attempt, which did the work."""
    if not report["error"]:
        return "the job has reached its end"
    if not report["unseen"]:
        return f"the job has failed: {report['error']}"
    unseen, said = ", ".join(report["unseen"]), report["last_said"] or "not known"
    return (
        f"the job has ended; whether it has failed is not known, because chaos lost sight of {unseen}; "
        f"it saw: {report['error']}; the launcher's last line: {said}"
    )


def _row(fault: Mapping[str, Any]) -> tuple[str, ...]:
    went_on = fault["went_on_seconds"]
    after = "-" if went_on is None else f"{went_on:.2f} s"
    if fault["from_step"]:
        after += f" from step {fault['from_step']}, {fault['repeated_steps']} repeated"
    deed = f"skipped: {fault['why_not']}" if fault["why_not"] else fault["deed"]
    before = f"{fault['steps_per_second_before']:.2f}"
    at = f"{fault['seconds']:.1f} s"
    named = textwrap.shorten(fault["named"] or "-", _MOST_NAMED, placeholder=" ...")
    return str(fault["number"]), at, fault["kind"], fault["victim"] or "-", deed, after, before, named


def _fault(episode: Episode, hit: Hit) -> dict[str, Any]:
    begin, end = _quiet(episode, hit)
    went_on = hit.went_on
    until = hit.seconds + went_on.seconds if went_on is not None else episode.seconds
    return {
        "number": hit.fault.number,
        "kind": hit.fault.kind,
        "planned_seconds": round(hit.fault.seconds, 2),
        "seconds": round(hit.seconds, 2),
        "victim": hit.victim,
        "deed": hit.deed,
        "why_not": hit.why_not,
        "went_on_seconds": None if went_on is None else round(went_on.seconds, 3),
        "from_step": went_on.from_step if went_on is not None else 0,
        "repeated_steps": went_on.repeated_steps if went_on is not None else 0,
        "steps_per_second_before": round(rate(episode.points, begin, end), 3),
        "steps_per_second_during": round(rate(episode.points, hit.seconds, until), 3),
        "samples_per_second_before": round(samples_per_second(episode.points, begin, end), 1),
        "samples_per_second_during": round(samples_per_second(episode.points, hit.seconds, until), 1),
        "named": _named(episode, hit),
    }


def _quiet(episode: Episode, hit: Hit) -> tuple[float, float]:
    """Return the time before a fault in which the job had gone on after the one before."""
    begin = 0.0
    for other in episode.hits[: episode.hits.index(hit)]:
        if other.went_on is not None:
            begin = other.seconds + other.went_on.seconds
    return begin, hit.seconds


def _lines(episode: Episode, hit: Hit) -> list[str]:
    """Return what the launcher said between this fault and the next one."""
    later = [other.seconds for other in episode.hits if other.seconds > hit.seconds and not other.why_not]
    return [line for seconds, line in episode.said if hit.seconds <= seconds < min(later, default=float("inf"))]


def _named(episode: Episode, hit: Hit) -> str:
    """Return the first line in which the launcher named the victim; "": none did."""
    if hit.why_not:
        return ""
    for line in _lines(episode, hit):
        ranks = {int(number) for words in re.findall(r"\branks? (\d[\d, -]*)", line) for number in _numbers(words)}
        if hit.rank in ranks if hit.rank is not None else re.search(rf"\b{re.escape(hit.host)}\b", line):
            return line.strip()
    return ""


def _numbers(words: str) -> list[int]:
    """Return the ranks of a text that rank_ranges has made."""
    ranks: list[int] = []
    for part in words.strip(" ,").split(","):
        first, _, last = part.strip().partition("-")
        if first.strip().isdigit():
            ranks += range(int(first), int(last if last.strip().isdigit() else first) + 1)
    return ranks


def _kinds(hits: Sequence[Hit]) -> list[str]:
    return list(dict.fromkeys(hit.fault.kind for hit in hits))


def _kind(episode: Episode, hits: Sequence[Hit]) -> dict[str, Any]:
    """Return how the job continued after all faults of a kind. A fault that made it start again must be named."""
    times = [hit.went_on.seconds for hit in hits if hit.went_on is not None]
    to_name = [hit for hit in hits if hit.fault.kind == "rank" or (hit.went_on is not None and hit.went_on.from_step)]
    return {
        "count": len(hits),
        "went_on": len(times),
        "median_seconds": round(statistics.median(times), 3) if times else None,
        "worst_seconds": round(max(times), 3) if times else None,
        "to_name": len(to_name),
        "named": sum(bool(_named(episode, hit)) for hit in to_name),
    }


_MOST_BARS = 240
_MARKERS = dict(zip(KINDS, "oshDv", strict=True))
_COLOURS = dict(zip(KINDS, ("tab:red", "tab:blue", "tab:orange", "tab:purple", "tab:brown"), strict=True))


def draw(path: Path, episode: Episode, title: str) -> None:
    """Draw new steps per second over time, with a mark for each fault; below, how long the job took to continue.

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
    times.set(ylabel="continued after (s)", xlabel=unit)
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
