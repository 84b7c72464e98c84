"""What happens around the steps: stop, log, evaluate, save. Every hook runs on every rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError
from mpitrain.exchange.overlap import hidden_share
from mpitrain.training.checkpoint import latest, load, save

if TYPE_CHECKING:
    from mpitrain.training.trainer import Step, Trainer


class Hook:
    """Empty methods; a hook overrides those it needs. They may make collective calls: all ranks are there."""

    def before_run(self, trainer: Trainer) -> None:
        """Once, before the first step."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """After every step."""

    def after_run(self, trainer: Trainer) -> None:
        """Once, after the last step; not after an error."""


class StopAtStep(Hook):
    """End the run after step `number`, counted from the start of training, also across a resume."""

    def __init__(self, number: int) -> None:
        if number < 1:
            raise ConfigError(f"StopAtStep({number}): the last step is at least 1")
        self._number = number

    def before_run(self, trainer: Trainer) -> None:
        """See Hook. Where several hooks stop, the earliest one does."""
        trainer.last_step = min(self._number, trainer.last_step or self._number)


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


class Evaluate(Hook):
    """Every `steps` steps and after the last one: compute metrics and print them on rank 0."""

    def __init__(self, steps: int, metrics: Callable[[Trainer], Mapping[str, float]]) -> None:
        """`metrics` is collective and gives the same on every rank; see metrics.evaluate."""
        if steps < 1:
            raise ConfigError(f"Evaluate every {steps} steps: it takes at least 1")
        self._steps = steps
        self._metrics = metrics
        self.results: dict[int, dict[str, float]] = {}

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        if step.number % self._steps and step.number != trainer.last_step:
            return
        values = dict(self._metrics(trainer))
        self.results[step.number] = values
        text = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        trainer.world.print(f"step {step.number}: {text}")


class Checkpoint(Hook):
    """Save every `steps` steps and after the last one, and go on from the newest checkpoint there is.

    Rank 0 writes and reads; the replicas are equal. The directory is one that rank 0 can write.
    """

    def __init__(self, directory: Path | str, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"Checkpoint every {steps} steps: it takes at least 1")
        self._directory = Path(directory)
        self._steps = steps

    def before_run(self, trainer: Trainer) -> None:
        """See Hook.

        Raises:
            CheckpointError: the newest checkpoint is damaged or of another model. On every rank.
        """
        world = trainer.world
        state = None
        with world.together("resume from a checkpoint"):
            path = latest(self._directory) if world.is_root else None
            state = load(path) if path else None
        state = world.broadcast(state)
        if state is None:
            return
        with world.together("resume from a checkpoint"):
            trainer.restore(state)
        world.print(f"resumed from {path} at step {trainer.step_number}")

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook.

        Raises:
            CheckpointError: it could not be written. On every rank; earlier ones are untouched.
        """
        if step.number % self._steps and step.number != trainer.last_step:
            return
        with trainer.world.together("save a checkpoint"):
            if trainer.world.is_root:
                save(self._directory, step.number, trainer.state())
