"""A table of the workers of a server, its queue, and a histogram of the staleness; as `mpitrain ps JOB` prints them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.shown import shown_bytes, shown_name

_SERVER_TITLES = ("SERVER", "PARAMETERS", "WHOLE TENSORS", "IN PART", "LARGEST", "OF", "SENT", "RECEIVED")
_TITLES = ("WORKER", "HOST", "STATE", "UNITS", "SAMPLES", "SAMPLES/S", "PULLED", "PUSHED", "REFUSED", "LATE")
_NUM_WORDS = 3  # the first columns, which are flush left
_MOST_BARS, _BAR_COLUMNS = 12, 50


def lines_of(served: Mapping[str, Any]) -> list[str]:
    """Return the lines for what a server has published, as launch.roster passes it on."""
    workers = sorted(served["workers"], key=lambda one: one["state"] == "gone")
    rows = [_TITLES, *(_row(one) for one in workers)]
    left_out = served["joined"] - len(workers)
    state = f"{served['here']} here, {served['joined'] - served['here']} gone"
    rows.append(("all", "", state, *_numbers(served["all"])))
    lines = table(rows, _NUM_WORDS)
    if left_out:
        lines.append(f"({left_out} more that are gone are only in the sum)")
    if parts := served.get("parts"):  # a server of an older version has none
        lines += ["", *table([_SERVER_TITLES, *(_part(one) for one in parts)], 1)]
    queue = served["queue"]
    units = f"{queue['out']:,} work units out, {queue['answered']:,} answered and not used yet"
    left = f"{queue['left']:,} samples up to the end of epoch {queue['epoch'] + 1} have not gone out"
    return [
        *lines,
        "",
        f"queue: {units}; {left}",
        "",
        *histogram({int(value): count for value, count in served["staleness"].items()}),
    ]


def table(rows: Sequence[Sequence[str]], num_words: int) -> list[str]:
    """Return rows of cells as lines. The first columns are flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column < num_words else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def histogram(counts: Mapping[int, int]) -> list[str]:
    """Return one line for each value, or for each range of values if there are many. The last range may be open."""
    total = sum(counts.values())
    if not total:
        return ["staleness: no gradient has made an update yet"]
    mean = sum(value * count for value, count in counts.items()) / total
    lines = [f"staleness: mean {mean:.1f}, largest {max(counts)}, of {total:,} gradients"]
    bars = _bars(counts, total)
    most, width = max(bars.values()), max(map(len, bars))
    digits = len(f"{most:,}")
    for label, count in bars.items():
        bar = "#" * math.ceil(_BAR_COLUMNS * count / most)
        lines.append(f"  {label.rjust(width)}  {count:{digits},}  {bar}".rstrip())
    return lines


def _bars(counts: Mapping[int, int], total: int) -> dict[str, int]:
    """Return the sums by range. One value far beyond the others does not make the ranges wide."""
    below, end = 0, 0
    for end in sorted(counts):
        below += counts[end]
        if below >= 0.99 * total and max(counts) >= _MOST_BARS:
            break
    step = next(
        size * ten
        for ten in (10**power for power in range(19))
        for size in (1, 2, 5)
        if end // (size * ten) < _MOST_BARS
    )
    last = (end // step + 1) * step
    bars = {}
    for begin in range(0, last, step):
        label = str(begin) if step == 1 else f"{begin}-{begin + step - 1}"
        bars[label] = sum(count for value, count in counts.items() if begin <= value < begin + step)
    if beyond := sum(count for value, count in counts.items() if value >= last):
        bars[f"{last} and more"] = beyond
    return bars


def _row(worker: Mapping[str, Any]) -> tuple[str, ...]:
    state = worker["state"]
    if "seconds" in worker:
        state = f"{state}, {worker['seconds']:.1f} s"
    return (shown_name(worker["name"]), shown_name(worker["host"]), state, *_numbers(worker))


def _part(server: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        shown_name(server["name"]),
        shown_bytes(server["num_bytes"]),
        f"{server['num_whole']:,}",
        f"{server['num_cut']:,}",
        shown_bytes(server["largest_bytes"]),
        shown_name(server["largest"]),
        shown_bytes(server["bytes_out"]),
        shown_bytes(server["bytes_in"]),
    )


def _numbers(tally: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{tally['units']:,}",
        f"{tally['samples']:,}",
        f"{tally['samples_per_second']:,.0f}",
        shown_bytes(tally["pulled_bytes"]),
        shown_bytes(tally["pushed_bytes"]),
        f"{tally['refused']:,}",
        f"{tally['dropped']:,}",
    )
