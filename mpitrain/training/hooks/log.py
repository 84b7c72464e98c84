"""A progress line."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from mpitrain.exchange.overlap import hidden_share
from mpitrain.training.hooks.hook import Hook

if TYPE_CHECKING:
    from mpitrain.training.trainer import Step, Trainer


class Log(Hook):
    """A progress line on rank 0: step, loss, learning rate, samples/s of all ranks, and the time left.

    With a loss scale also: what it is, and how many steps it cost since the start of training. Between nodes: how long
    gradients were under way in a step, and how much of that the step did not wait for.
    On a terminal one line that is kept up to date; otherwise a line every `seconds`.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        """`seconds` between lines where stdout is no terminal."""
        self._seconds = seconds

    def before_run(self, trainer: Trainer) -> None:
        """See Hook."""
        self._terminal = sys.stdout.isatty()
        self._interval = 0.2 if self._terminal else self._seconds
        self._last = time.perf_counter()
        self._first = True  # the first step is shown at once: training has begun
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
        last = trainer.last_step or step.number
        if elapsed < self._interval and step.number != last and not self._first:
            return
        left = timedelta(seconds=round((last - step.number) * elapsed / self._steps))
        line = (
            f"epoch {trainer.data.epoch + 1} step {step.number}/{last} | loss {step.loss:.4f} | "
            f"lr {step.learning_rate:.3g} | {self._samples / elapsed:,.0f} samples/s | {left} left"
        )
        scale = trainer.adapter.loss_scale
        if scale:
            line += f" | loss scale {scale.value:g}, {scale.skipped_steps} skipped"
        if trainer.world.num_nodes > 1:
            hidden = hidden_share(self._exposed, self._wire)
            line += f" | wire {self._wire / self._steps * 1e3:.1f} ms, {hidden:.0%} hidden"
        end = "\n" if not self._terminal or step.number == last else ""
        sys.stdout.write(("\r\x1b[K" if self._terminal else "") + line + end)
        sys.stdout.flush()
        self._last, self._first, self._steps = now, False, 0
        self._samples = self._exposed = self._wire = 0.0
