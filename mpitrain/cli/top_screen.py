"""The screen of `mpitrain top`: the last samples, their display, and the keys.

The history of the ranks and the picture, as Rich draws it, are pure. The screen draws each look, and ends with the job.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import sys
import termios
import textwrap
import time
import tty
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mpitrain.cli.terminal_text import printable
from mpitrain.errors import LaunchError
from mpitrain.launch.live_jobs import LiveJob, LiveSource
from mpitrain.launch.live_picture import fact_columns, slow_rank, waiting_shares
from mpitrain.shown import shown_seconds
from mpitrain.watching.rank_facts import KNOWN, RankFact

Order = Literal["slowest", "rank", "host"]

_SECONDS = 10.0
# In these a rank does not continue by itself, or may not.
MARKED = ("stopped", "disk", "failed", "ended", "unknown")
_AWAITS = ("waits", "wire")
_WAITING = (*_AWAITS, "done", "lost", "paused")


class TopHistory:
    """The looks of the last 10 s."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, str, Mapping[int, str]]] = deque()
        self._whole: deque[Mapping[str, Any]] = deque()  # the same looks
        self._begun: dict[int, tuple[int, float]] = {}  # of each rank its step, and when a look first had it
        self.waiting: Mapping[int, float] = {}  # the share of the time in which each rank has waited; {}: not known

    def add(self, answer: Mapping[str, Any]) -> None:
        """Add a sample. A new attempt of the job starts a new history."""
        phases = {entry["rank"]: entry["phase"] for entry in answer["ranks"]}
        at = answer["at"]
        while self._looks and (
            self._looks[0][1] != answer["job"] or not at - _SECONDS <= self._looks[0][0] <= at  # or the clock was set
        ):
            self._looks.popleft()
            self._whole.popleft()
        for entry in answer["ranks"]:
            if self._begun.setdefault(entry["rank"], (entry["step"], -math.inf))[0] != entry["step"]:
                self._begun[entry["rank"]] = entry["step"], at
        self._looks.append((at, answer["job"], phases))
        self._whole.append(answer)
        self.waiting = waiting_shares(list(self._whole))

    @property
    def slow(self) -> str:
        """Which rank makes the others wait, in a sentence; "": none does."""
        return slow_rank(list(self._whole))

    def seconds(self, entry: Mapping[str, Any]) -> float | None:
        """Return for how long the rank has done what it does. A rank that makes steps computes since the last one.

        None: it is paused. It then looks for commands again and again, and the head of the picture says since when.
        """
        if entry["phase"] == PAUSED:
            return None
        if entry["phase"] != "computes" or not self._looks:
            return float(entry["since"])
        return min(float(entry["since"]), max(0.0, self._looks[-1][0] - self._begun[entry["rank"]][1]))

    def shares(self, rank: int) -> dict[str, float]:
        """Return the share of the looks in which the rank was in each phase. Waits that no look has seen count too."""
        counts = Counter(phases[rank] for _, _, phases in self._looks if rank in phases)
        shares = {phase: count / counts.total() for phase, count in counts.items()}
        unseen = self.waiting.get(rank, 0.0) - sum(shares.get(phase, 0.0) for phase in _AWAITS)
        if (unseen := min(unseen, shares.get("computes", 0.0))) > 0:
            shares["waits"] = shares.get("waits", 0.0) + unseen
            shares["computes"] -= unseen
        return shares

    def sort(self, ranks: Sequence[Mapping[str, Any]], order: Order) -> list[Mapping[str, Any]]:
        """Return the ranks in this order. The slowest one is that which has waited least for the others."""

        def key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
            if order == "host":
                return entry["host"], entry["rank"]
            if order == "rank":
                return (entry["rank"],)
            waited = sum(share for phase, share in self.shares(entry["rank"]).items() if phase in _WAITING)
            steps_behind = newest - entry["step"] if newest - entry["step"] > 1 else 0  # one: it is about to begin it
            return entry["phase"] not in MARKED, -steps_behind, round(waited, 2), entry["rank"]

        newest = max((entry["step"] for entry in ranks), default=0)
        return sorted(ranks, key=key)


_BAR_COLUMNS = 16
# Below these widths a column is left out.
_WIDE, _MIDDLE = 76, 44
_MOST_HOST, _MOST_CALL = 16, 60
# Two empty ones, the title of the table, the hosts and the keys; one more says how many ranks are not shown.
_OTHER_LINES = 5
_MOST_TEXT_LINES = 4
PAUSED = "paused"
_LONG_SILENCE = 2.5
# Lines of the launcher about waits and slow ranks. The picture says whether there is one now.
_OF_STALL = re.compile(r" |no progress for |not all ranks have finished|rank \d+ on .* is [\d.]+x slower: ")
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
    ranks = history.sort(answer["ranks"], order)
    shown = ranks[first:] if height is None else ranks[first : first + rows_for(answer, width, height)]
    slow = _line(printable(history.slow), "bold yellow")
    slow.truncate(width, overflow="ellipsis")
    parts: list[RenderableType] = [*head(answer, width), slow, _table(shown, history, width), Text()]
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
    """Return the lines about the progress of the job."""
    since = timedelta(seconds=max(0, round(answer["at"] - answer["since"])))
    tries = f"  attempt {answer['tries']}" if answer["tries"] > 1 else ""
    first = _line(f"job {answer['job'] or '-'}  ", "bold")
    state = state_of(answer)
    first.append(state, {"trains": "bold green", "ends": "bold"}.get(state, "bold yellow"))
    first.append(f"  {since}{tries}")
    lines = [first, _line(printable(" ".join([answer["script"], *answer["arguments"]]))), _progress(answer)]
    if state == PAUSED:
        lines += _wrapped(answer["paused"], width, "bold yellow")
    if answer.get("stall"):
        lines += _wrapped(answer["stall"], width, "bold red")
    elif state != PAUSED and (news := [event for event in answer["events"] if not _OF_STALL.match(event["text"])]):
        last = news[-1]
        at = time.strftime("%H:%M:%S", time.localtime(last["at"]))
        lines.append(_line(f"{at} {printable(last['text'])}"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def state_of(answer: Mapping[str, Any]) -> str:
    """Return the state of a job in a word."""
    return PAUSED if answer.get("paused") and answer["state"] != "ends" else str(answer["state"])


def _wrapped(text: str, width: int, style: str) -> list[Text]:
    lines = textwrap.wrap(printable(text), width, max_lines=_MOST_TEXT_LINES, placeholder=" …")
    return [_line(line, style) for line in lines]


def _progress(answer: Mapping[str, Any]) -> Text:
    ranks, metrics = answer["ranks"], answer["metrics"]
    step = max((entry["step"] for entry in ranks), default=0)
    facts = [f"step {step:,}"]
    if last := max((entry.get("last_step") or 0 for entry in ranks), default=0):
        facts = [f"step {step:,} / {last:,}", f"{100 * step // last} %"]
    if (left := next((entry["left"] for entry in ranks if entry.get("left")), None)) and state_of(answer) == "trains":
        facts.append(f"{shown_seconds(left)} left")
    if "loss" in metrics:
        facts.append(f"loss {_number(metrics['loss'], '.4g')}")
    if "samples/s" in metrics and state_of(answer) != PAUSED:
        facts.append(f"{_number(metrics['samples/s'], ',.0f')} samples/s")
    if epochs := [entry["epoch"] for entry in ranks if entry["epoch"]]:
        facts.append(f"epoch {max(epochs)}")
    if answer.get("printed"):
        facts.append("(read from the output)")
    served = answer["served"] or {}
    if "here" in served:
        facts.append(f"{served['here']} workers, {served['joined'] - served['here']} gone")
    return _line("  ".join(facts))


def _table(ranks: Sequence[Mapping[str, Any]], history: TopHistory, width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", expand=width >= _WIDE)
    is_wide, is_middle = width >= _WIDE, width >= _MIDDLE
    facts = [fact for fact in fact_columns(ranks) if is_wide or fact.column != KNOWN]
    table.add_column("", width=1, no_wrap=True)
    table.add_column("RANK", justify="right", no_wrap=True)
    if is_middle:
        table.add_column("HOST", no_wrap=True, overflow="ellipsis", max_width=_MOST_HOST)
    table.add_column("PHASE", no_wrap=True, overflow="ellipsis")
    table.add_column("FOR", justify="right", no_wrap=True)
    for fact in facts:
        table.add_column(fact.heading.upper(), justify="right", no_wrap=True)
    if is_wide and history.waiting:
        table.add_column("WAITS", justify="right", no_wrap=True)
    if is_wide:
        table.add_column("LAST 10 S", width=_BAR_COLUMNS, no_wrap=True)
        table.add_column("IN", no_wrap=True, overflow="ellipsis", ratio=1)
    for entry in ranks:
        phase = entry["phase"]
        is_marked = phase in MARKED
        _, style = _style(phase)
        cells: list[RenderableType] = [_line("!" if is_marked else " ", "bold red"), _line(str(entry["rank"]))]
        if is_middle:
            cells.append(_line(printable(entry["host"])))
        cells += [_line(printable(phase), style), _line(_duration(history.seconds(entry)))]
        cells += [_line(_fact(fact, entry.get(fact.name))) for fact in facts]
        shares = history.shares(entry["rank"])
        if is_wide and history.waiting:
            cells.append(_line(f"{sum(shares.get(phase, 0.0) for phase in _AWAITS):.0%}"))
        if is_wide:
            cells += [_bar(shares), _line(printable(entry["call"])[:_MOST_CALL])]
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
    hosts = answer["hosts"].items()  # in their order, but silent ones first
    for number, (host, about) in enumerate(sorted(hosts, key=lambda item: -max(item[1]["silence"], _LONG_SILENCE))):
        line.append(", " if number else "")
        silence = about["silence"]
        text = f"{printable(host)} ({len(about['ranks'])})"
        if silence > _LONG_SILENCE:
            line.append(f"{text} silent for {silence:.0f} s", "bold red")
        else:
            line.append(text)
    line.truncate(width, overflow="ellipsis")
    return line


def _style(phase: str) -> tuple[str, str]:
    return _PHASES.get(phase, (printable(phase[:1]), ""))


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis", end="\n")


def _number(value: float | str, form: str) -> str:
    return value if isinstance(value, str) else format(value, form)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _fact(fact: RankFact, value: float | str | None) -> str:
    if value in (None, fact.absent):
        return "-"
    return str(value) if isinstance(value, str) or not fact.unit else _duration(value)


# Short enough for the share of each phase in the last 10 s, and long enough to read.
_LOOK_SECONDS = 0.5
_IDLE_SECONDS = 0.5
_KEYS = "q end  s slowest  r rank  h host  arrows scroll"
_ORDERS: Mapping[str, Order] = {"s": "slowest", "r": "rank", "h": "host"}
_UP, _DOWN, _PAGE_UP, _PAGE_DOWN = "\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[6~"


def look_once(job: LiveJob) -> None:
    """Print what the job does now."""
    history = TopHistory()
    history.add(job.answer)
    console = Console(soft_wrap=False)
    with console.capture() as drawn:
        console.print(picture(job.answer, history, "slowest", console.width, None))
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))  # Rich fills up the lines of a table


def show(job: LiveJob) -> int:
    """Show the job until it ends or the user ends it. Return the exit code."""
    try:
        source = job.watch(_LOOK_SECONDS)
    except LaunchError:  # it has ended since it was found
        print(_how(job.answer, None))
        return 0
    try:
        with _keys() as resized:
            last, error = _Screen(job, source, resized).run()
        has_ended = source.is_closed
    except KeyboardInterrupt:
        return 0
    finally:
        source.close()
    if error:
        raise LaunchError(error)
    if has_ended:
        print(_how(last, last.get("ended")))
    return 0


class _Screen:
    """What is shown, and how."""

    def __init__(self, job: LiveJob, source: LiveSource, resized: int) -> None:
        self._answer, self._source, self._resized = job.answer, source, resized
        self._history = TopHistory()
        self._history.add(job.answer)
        self._order: Order = "slowest"
        self._first = 0
        self._is_over = False

    def run(self) -> tuple[Mapping[str, Any], str]:
        """Return the last look, and what the launcher refuses; "": nothing."""
        console = Console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not self._is_over:
                size = console.size
                rows = rows_for(self._answer, size.width, size.height)
                self._first = max(0, min(self._first, len(self._answer["ranks"]) - rows))
                drawn = picture(self._answer, self._history, self._order, size.width, size.height, self._first, _KEYS)
                live.update(drawn, refresh=True)
                if error := self._wait(rows):
                    return self._answer, error
        return self._answer, ""

    def _wait(self, page: int) -> str:
        """Wait for the next look, a key, or another size of the terminal."""
        source = self._source.fileno()
        ways = [sys.stdin.fileno(), self._resized, *([source] if source >= 0 else [])]
        ready, _, _ = select.select(ways, [], [], _IDLE_SECONDS if source >= 0 else _IDLE_SECONDS / 5)
        if self._resized in ready:
            os.read(self._resized, 1 << 10)
        if sys.stdin.fileno() in ready:
            self._hear(os.read(sys.stdin.fileno(), 1 << 10).decode(errors="replace"), page)
        if source in ready or source < 0:
            answer = self._source.receive(0.0)
            if answer is not None and "error" in answer:
                return str(answer["error"])
            if answer is not None:
                self._answer = answer
                self._history.add(answer)
            self._is_over = self._is_over or self._source.is_closed
        return ""

    def _hear(self, keys: str, page: int) -> None:
        if not keys or "q" in keys or "\x03" in keys:  # the terminal is gone, or the user quits
            self._is_over = True
        self._order = next(
            (_ORDERS[key] for key in reversed(keys) if key in _ORDERS and keys[0] != "\x1b"), self._order
        )
        moves = {_UP: -1, "k": -1, _DOWN: 1, "j": 1, _PAGE_UP: -page, _PAGE_DOWN: page, " ": page}
        self._first += moves.get(keys, 0)


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Switch to reading single keys. Yield a descriptor that becomes readable when the terminal's size changes."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    resized, tell = os.pipe()
    os.set_blocking(tell, False)

    def on_resize(_number: int, _frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(tell, b".")

    handler = signal.signal(signal.SIGWINCH, on_resize)
    try:
        tty.setcbreak(descriptor)
        yield resized
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, handler)
        os.close(resized)
        os.close(tell)


def _how(answer: Mapping[str, Any], ended: Mapping[str, Any] | None) -> str:
    """Print how the displayed job has ended."""
    step = max((entry["step"] for entry in answer["ranks"]), default=0)
    at = f"{time.strftime('%H:%M:%S')}, at step {step}"
    if ended is not None:
        return f"job {answer['job']}: {ended['text']} ({at})"
    if answer["served"] is not None:
        return f"job {answer['job']}: its server has ended ({at})"
    return f"job {answer['job']}: its launcher has ended without a message, or was killed ({at})"
