"""The console: a progress bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import io
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from mpitrain.context import BAR_START, JobContext
from mpitrain.early import is_helper
from mpitrain.reducer.means import hidden_share
from mpitrain.shown import shown_seconds
from mpitrain.training.hooks.hook import Hook

if TYPE_CHECKING:
    from mpitrain.training.run_event import RunEvent
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer

# The time between two drawings of the bar on a terminal.
_BAR_SECONDS = 0.2
_LEAST_CELLS = 10  # of the bar
# The fields beside the bar, in the order in which they are dropped if the terminal is too narrow.
_LESS = ("wire ", "loss scale ", "lr ", "samples/s")


class Log(Hook):
    """Show progress on rank 0: step, loss, learning rate, samples/s of all ranks, and the time left.

    With a loss scale also: its value, and the number of steps skipped since the start of training. Between nodes also:
    the communication time of a step, and how much of it was overlapped. If rank 0 or its `mpitrain run` writes to a
    terminal, Log shows a progress bar below what is printed. Otherwise it prints a line every `seconds`. Ranks that
    plain mpiexec started write into pipes, so they print lines.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        """`seconds` is the time between lines if stdout is not a terminal."""
        self._seconds = seconds
        self._bar: _Bar | None = None

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return False

    def before_run(self, trainer: Trainer) -> None:
        """See Hook."""
        launcher = JobContext.read(os.environ)
        # Open MPI gives its ranks a terminal of their own, even if their output goes elsewhere.
        is_own = (not launcher.job or launcher.serve.kind) and trainer.world.size == 1 and sys.stdout.isatty()
        # The output of a program that a rank starts may go anywhere, though the program inherits the rank's variables.
        columns = 0 if is_helper() else launcher.columns
        is_terminal = is_own or columns > 0
        if trainer.world.is_root and is_terminal:
            self._bar = _Bar(trainer.step_number, trainer.last_step, columns)
        self._interval = _BAR_SECONDS if is_terminal else self._seconds
        self._last = time.perf_counter()
        self._first = True  # show the first step at once: it shows that training has begun
        self._steps = 0
        self._samples = self._exposed = self._wire = 0.0

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        if not trainer.world.is_root:
            return
        self._steps += 1
        self._samples += step.samples
        self._exposed += step.overlap.exposed_seconds
        self._wire += step.overlap.wire_seconds
        now = time.perf_counter()
        elapsed = now - self._last
        last = trainer.last_step
        if elapsed < self._interval and step.number != last and not self._first:
            return
        facts = [
            f"loss {step.loss:.4f}",
            f"lr {step.learning_rate:.3g}",
            f"{self._samples / elapsed:,.0f} samples/s",
        ]
        if trainer.seconds_left is not None:
            facts.append(f"{shown_seconds(trainer.seconds_left)} left")
        scale = trainer.adapter.loss_scale
        if scale:
            facts.append(f"loss scale {scale.value:g}, {scale.skipped_steps} skipped")
        if trainer.world.num_nodes > 1:
            hidden = hidden_share(self._exposed, self._wire)
            facts.append(f"wire {self._wire / self._steps * 1e3:.1f} ms, {hidden:.0%} hidden")
        where = f"epoch {trainer.data.epoch + 1} step {step.number}" + (f"/{last}" if last is not None else "")
        if self._bar:
            self._bar.show(step.number, last, where, facts)
        else:
            print(" | ".join([where, *facts]), flush=True)
        self._last, self._first, self._steps = now, False, 0
        self._samples = self._exposed = self._wire = 0.0

    def went_on(self, trainer: Trainer, event: RunEvent) -> None:
        """See Hook. A pause does not count in the displayed rates."""
        if event.source == "told":
            self._last += event.seconds

    def close(self) -> None:
        """See Hook."""
        if self._bar:
            self._bar.stop()
            self._bar = None


class _Bar:
    """Rich's progress bar. Other output appears above it."""

    def __init__(self, first: int, last: int | None, columns: int) -> None:
        """`columns` is the width of the launcher's terminal; 0: stdout is a terminal."""
        # Imported here, so that the time to load it is spent only for a terminal.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        share, facts = TextColumn("{task.fields[share]}"), TextColumn("{task.fields[facts]}")
        texts = [TextColumn("{task.fields[where]}"), BarColumn(bar_width=None), share, facts]
        if columns:
            # From the encoding, Rich knows which characters the bar may have. Nothing is written to the file.
            file = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding)
            self._console = Console(file=file, force_terminal=True, width=columns - 1)
        else:
            self._console = Console(file=sys.stdout)
        self._is_own = not columns
        self._last_line = ""
        # `show` draws the bar, so that no thread takes processor time from a step.
        self._progress: Any = Progress(*texts, console=self._console, auto_refresh=False, expand=True)
        self._task = self._progress.add_task("", total=last, completed=first, where="", share="", facts="")
        if self._is_own:
            self._progress.start()

    def show(self, number: int, last: int | None, where: str, facts: list[str]) -> None:
        share = f"{100 * number // last:3d}%" if last else ""
        shown, room = list(facts), self._console.width - len(where) - _LEAST_CELLS - len(share) - 3  # spaces between
        for words in _LESS:
            if len(" | ".join(shown)) > room:
                shown = [fact for fact in shown if words not in fact]
        fields = {"where": where, "share": share, "facts": " | ".join(shown)}
        self._progress.update(self._task, completed=number, total=last, **fields)
        if self._is_own:
            self._progress.refresh()
            return
        self._last_line = " | ".join([where, *facts])
        with self._console.capture() as drawn:
            self._console.print(self._progress.get_renderable(), end="")
        self._to_launcher(drawn.get().partition("\n")[0])

    def stop(self) -> None:
        if self._is_own:
            self._progress.stop()
        else:
            self._to_launcher("")
            print(self._last_line, flush=True)

    def _to_launcher(self, line: str) -> None:
        sys.stdout.write(f"{BAR_START.decode()}{line}\r")
        sys.stdout.flush()
