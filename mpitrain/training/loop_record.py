"""The record of a loop without a Trainer: for `mpitrain plot`, ps, top and the dashboard."""

from __future__ import annotations

import atexit
import sys
import time
from contextlib import suppress
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.job.start import init
from mpitrain.training.metrics import is_name, is_number
from mpitrain.training.run_document import DONE, document_of
from mpitrain.training.writers.json_lines import JsonLines
from mpitrain.watching.activity import own_activity

_OWN = ("step", "seconds")  # of each row


class LoopRecord:
    """Call it with a step and its numbers. See `record_loop`."""

    def __init__(self, directory: Path | str, after_step: int) -> None:
        world = init()
        self._name, self._since = world.name(), time.monotonic()
        self._writer: JsonLines | None = None
        with world.together("open the record"):
            if world.is_root and not world.rehearsal:
                self._writer = JsonLines(Path(directory).absolute())
                self._document = document_of(world, "", after_step, [])
                self._writer.open(after_step)
                self._writer.describe(self._document)
                atexit.register(self._close)
                if activity := own_activity():
                    activity.keep_record(str(Path(directory).absolute()))

    def __call__(self, step: int, **metrics: float) -> None:
        """Add a row. Rank 0's numbers are written; the other ranks only show their step. Not collective.

        Args:
            step: the step after which the numbers were measured, greater than that of the previous row.
            metrics: numbers by name, or arrays and tensors of one number. Give means over ranks, such as those of
                `world.mean` or of `data.mean`.

        Raises:
            ConfigError: a metric is not a number, or its name is not allowed.
        """
        for name, value in metrics.items():
            if not is_name(name) or name in _OWN:
                raise ConfigError(
                    f"{self._name}: the metric {name!r} of step {step}; allowed is a printable name other than "
                    f"{' and '.join(_OWN)}. Give it another name"
                )
            if not is_number(value):
                raise ConfigError(
                    f"{self._name}: the metric {name!r} of step {step} is {value!r:.80}; it is not a number"
                )
        activity = own_activity()
        if activity:
            activity.begin_step(int(step))
        if self._writer is None:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        if activity:
            activity.report(numbers)
        try:
            self._writer.write({"step": step, "seconds": time.monotonic() - self._since, **numbers})
        except OSError as error:
            print(f"mpitrain: {self._name}: {self._writer} cannot be written: {error}", file=sys.stderr, flush=True)

    def _close(self) -> None:
        assert self._writer is not None
        error = getattr(sys, "last_value", None)  # the one that ended the script
        end = DONE if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
        with suppress(OSError):
            self._writer.describe(self._document.ended_now(end))
        self._writer.close()


def record_loop(directory: Path | str, *, after_step: int = 0) -> LoopRecord:
    """Begin the record of your own training loop, in PyTorch, JAX or NumPy. Collective.

    Rank 0 writes `metrics.jsonl` and `run.json` into `directory`. Under `mpitrain plan` and `verify`, nothing is
    written.

        record = mt.record_loop("runs/first")
        for step, (x, y) in enumerate(data, 1):
            ...
            record(step, loss=data.mean(loss))

    Args:
        directory: is created if it is missing.
        after_step: the step after which a loop continues. Rows of later steps are removed; with 0 all rows.

    Raises:
        DataError: the directory has a file that is not a record. Raised on every rank.
    """
    return LoopRecord(directory, after_step)
