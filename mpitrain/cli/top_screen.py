"""The screen of `mpitrain top`: draws each look of a job, hears keys, and ends with the job."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live

from mpitrain.cli.top_history import Order, TopHistory
from mpitrain.cli.top_view import picture, rows_for
from mpitrain.errors import LaunchError
from mpitrain.launch.live_jobs import LiveJob, LiveSource

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
        if not keys or "q" in keys or "\x03" in keys:  # the terminal has gone, or the user has seen enough
            self._is_over = True
        self._order = next(
            (_ORDERS[key] for key in reversed(keys) if key in _ORDERS and keys[0] != "\x1b"), self._order
        )
        moves = {_UP: -1, "k": -1, _DOWN: 1, "j": 1, _PAGE_UP: -page, _PAGE_DOWN: page, " ": page}
        self._first += moves.get(keys, 0)


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Have keys come one by one. Yield a descriptor that is readable when the terminal has another size."""
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
    """Say how a job has ended that was shown."""
    step = max((entry["step"] for entry in answer["ranks"]), default=0)
    at = f"{time.strftime('%H:%M:%S')}, at step {step}"
    if ended is not None:
        return f"job {answer['job']}: {ended['text']} ({at})"
    if answer["served"] is not None:
        return f"job {answer['job']}: its server has ended ({at})"
    return f"job {answer['job']}: its launcher has ended without a word, or was killed ({at})"
