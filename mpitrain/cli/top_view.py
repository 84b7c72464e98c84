"""The picture of a job for `mpitrain top`, as Rich draws it: head, ranks, hosts. Pure functions."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mpitrain.cli.top_history import MARKED, Order, TopHistory, in_pause

_BAR_COLUMNS = 16
# Below these widths a column is left out.
_WIDE, _MIDDLE = 76, 44
_MOST_HOST, _MOST_CALL = 16, 60
# Two empty ones, the title of the table, the hosts and the keys; one more says how many ranks are not shown.
_OTHER_LINES = 5
_MOST_TEXT_LINES = 4
PAUSED = "paused"
_LONG_SILENCE = 2.5
# By phase: its letter in a bar, and its style.
_PHASES = {
    "computes": ("c", "green"),
    "waits": (".", "yellow"),
    "wire": ("w", "cyan"),
    "busy": ("b", "magenta"),
    "disk": ("d", "bold red"),
    "stopped": ("s", "bold red"),
    "failed": ("f", "bold red"),
    "unknown": ("?", "bold red"),
    "ended": ("e", "red"),
    "lost": ("l", "dim"),
    "paused": ("p", "yellow"),
    "starts": ("i", "blue"),
    "done": ("-", "dim"),
}
_LEGEND = "c computes  . waits  w wire  b busy  d disk  s stopped  p paused"


def picture(
    answer: Mapping[str, Any],
    history: TopHistory,
    order: Order,
    width: int,
    height: int | None,
    first: int = 0,
    keys: str = "",
) -> RenderableType:
    """Return what to draw.

    Args:
        answer: the newest look.
        history: of the looks before, with this one.
        order: of the ranks.
        width: in columns.
        height: in lines; None: as many as it takes.
        first: so many ranks at the top are left out.
        keys: the last line; "": there is none.
    """
    ranks = history.sort(in_pause(answer)["ranks"], order)
    shown = ranks[first:] if height is None else ranks[first : first + rows_for(answer, width, height)]
    parts: list[RenderableType] = [*head(answer, width), Text(), _table(shown, history, width), Text()]
    if left_out := len(ranks) - len(shown):
        parts.append(_line(f"ranks {first + 1} to {first + len(shown)} of {len(ranks)}; {left_out} are not shown"))
    parts.append(_hosts(answer, width))
    if width >= _WIDE:
        parts.append(_line(f"last 10 s: {_LEGEND}", "dim"))
    if keys:
        parts.append(_line(keys, "dim"))
    return Group(*parts)


def rows_for(answer: Mapping[str, Any], width: int, height: int) -> int:
    """Return how many ranks fit into a terminal of this size."""
    rows = height - len(head(answer, width)) - _OTHER_LINES - (width >= _WIDE)
    return max(1, rows if rows >= len(answer["ranks"]) else rows - 1)


def head(answer: Mapping[str, Any], width: int) -> list[Text]:
    """Return the lines that say how the job goes."""
    since = timedelta(seconds=max(0, round(answer["at"] - answer["since"])))
    tries = f"  try {answer['tries']}" if answer["tries"] > 1 else ""
    first = _line(f"job {answer['job'] or '-'}  ", "bold")
    state = state_of(answer)
    first.append(state, {"trains": "bold green", "ends": "bold"}.get(state, "bold yellow"))
    first.append(f"  {since}{tries}")
    lines = [first, _line(_printable(" ".join([answer["script"], *answer["arguments"]]))), _progress(answer)]
    if state == PAUSED:
        lines += _wrapped(answer["paused"], width, "bold yellow")
    if answer.get("stall"):
        lines += _wrapped(answer["stall"], width, "bold red")
    elif answer["events"] and state != PAUSED:
        last = answer["events"][-1]
        at = time.strftime("%H:%M:%S", time.localtime(last["at"]))
        lines.append(_line(f"{at} {_printable(last['text'])}"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def state_of(answer: Mapping[str, Any]) -> str:
    """Return the state of a job in a word."""
    return PAUSED if answer.get("paused") and answer["state"] != "ends" else str(answer["state"])


def _wrapped(text: str, width: int, style: str) -> list[Text]:
    lines = textwrap.wrap(_printable(text), width, max_lines=_MOST_TEXT_LINES, placeholder=" …")
    return [_line(line, style) for line in lines]


def _progress(answer: Mapping[str, Any]) -> Text:
    ranks, metrics = answer["ranks"], answer["metrics"]
    facts = [f"step {max((entry['step'] for entry in ranks), default=0):,}"]
    if epochs := [entry["epoch"] for entry in ranks if entry["epoch"]]:
        facts.append(f"epoch {max(epochs)}")
    if "loss" in metrics:
        facts.append(f"loss {_number(metrics['loss'], '.4g')}")
    if "samples/s" in metrics and state_of(answer) != PAUSED:
        facts.append(f"{_number(metrics['samples/s'], ',.0f')} samples/s")
    served = answer["served"] or {}
    if "here" in served:
        facts.append(f"{served['here']} workers, {served['joined'] - served['here']} gone")
    return _line("  ".join(facts))


def _table(ranks: Sequence[Mapping[str, Any]], history: TopHistory, width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", expand=width >= _WIDE)
    is_wide, is_middle = width >= _WIDE, width >= _MIDDLE
    table.add_column("", width=1, no_wrap=True)
    table.add_column("RANK", justify="right", no_wrap=True)
    if is_middle:
        table.add_column("HOST", no_wrap=True, overflow="ellipsis", max_width=_MOST_HOST)
    table.add_column("PHASE", no_wrap=True, overflow="ellipsis")
    table.add_column("FOR", justify="right", no_wrap=True)
    table.add_column("STEP", justify="right", no_wrap=True)
    if is_wide:
        table.add_column("LAST 10 S", width=_BAR_COLUMNS, no_wrap=True)
        table.add_column("IN", no_wrap=True, overflow="ellipsis", ratio=1)
    for entry in ranks:
        phase = entry["phase"]
        is_marked = phase in MARKED
        _, style = _style(phase)
        cells: list[RenderableType] = [_line("!" if is_marked else " ", "bold red"), _line(str(entry["rank"]))]
        if is_middle:
            cells.append(_line(_printable(entry["host"])))
        cells += [_line(_printable(phase), style), _line(_duration(entry["since"])), _line(f"{entry['step'] or '-'}")]
        if is_wide:
            cells += [_bar(history.shares(entry["rank"])), _line(_printable(entry["call"])[:_MOST_CALL])]
        table.add_row(*cells)
    return table


def _bar(shares: Mapping[str, float]) -> Text:
    """Return a bar of one letter for each 1/16 of the last seconds."""
    bar = Text(no_wrap=True)
    end, drawn = 0.0, 0
    known = list(_PHASES)
    for phase in sorted(shares, key=lambda phase: known.index(phase) if phase in known else len(known)):
        end += shares[phase]
        letter, style = _style(phase)
        columns = round(end * _BAR_COLUMNS) - drawn
        bar.append(letter * columns, style)
        drawn += columns
    return bar


def _hosts(answer: Mapping[str, Any], width: int) -> Text:
    line = _line("hosts: ")
    hosts = answer["hosts"].items()
    for number, (host, about) in enumerate(sorted(hosts, key=lambda item: -item[1]["silence"])):
        line.append(", " if number else "")
        silence = about["silence"]
        text = f"{_printable(host)} ({len(about['ranks'])})"
        if silence > _LONG_SILENCE:
            line.append(f"{text} silent for {silence:.0f} s", "bold red")
        else:
            line.append(text)
    line.truncate(width, overflow="ellipsis")
    return line


def _style(phase: str) -> tuple[str, str]:
    return _PHASES.get(phase, (_printable(phase[:1]), ""))


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis", end="\n")


def _number(value: float | str, form: str) -> str:
    return value if isinstance(value, str) else format(value, form)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _printable(text: str) -> str:
    """Return text without control characters: names and errors come from scripts."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
