"""The record of a run: rows of numbers that meters and hooks measure and writers store."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.early import words_of_exit
from mpitrain.errors import CheckpointError, ConfigError, everywhere, is_of_another_rank, text_of
from mpitrain.training.hooks.checkpoint import Checkpoint
from mpitrain.training.hooks.evaluation import Evaluation
from mpitrain.training.hooks.hook import Hook
from mpitrain.training.meters import (
    Communication,
    GpuUtilisation,
    GradientNorm,
    LearningRate,
    Loss,
    Memory,
    Meter,
    Throughput,
    Workers,
    combine,
    gpu_of,
)
from mpitrain.training.run_document import DONE, LEFT, RunDocument, document_of
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.json_lines import JsonLines
from mpitrain.training.writers.writer import OUTER_STEPS, BatchingWriter, DescribingWriter, Row, Writer
from mpitrain.watching.activity import own_activity

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer

# The names that each row begins with.
_FIRST = ("step", "epoch", "samples", "seconds")


class Record(Hook):
    """Write a row of numbers every `steps` steps, after the last step, and after steps that earlier hooks report.

    A row has the step, the epoch, and the samples and seconds of training so far, including the runs that this run
    resumes. It has the numbers that the meters have measured over all ranks since the last row (one small message a
    row), and the numbers that the hooks have reported for this step. Rank 0 writes. Record also reports the numbers of
    the meters to the hooks that follow. The first row after a fault from which the training continued has the event.

    A run that resumes at step k removes rows of later steps that an earlier run has written, so no step has two rows. A
    run from the beginning removes all rows. If a writer fails, for example because the disk is full, training
    continues. A warning goes to stderr, and with the next row Record tries the writer again, with all rows that are
    missing.
    """

    writes_files = True

    def __init__(
        self,
        writers: Sequence[Writer],
        *,
        steps: int = 10,
        meters: Sequence[Meter] | None = None,
        tokens_per_sample: int | None = None,
    ) -> None:
        """
        Args:
            writers: for example JsonLines, Csv, TensorBoard, Mlflow, Wandb.
            steps: the number of steps from row to row.
            meters: default: all in mpitrain.training.meters, with GpuUtilisation only if the model is on GPUs. A server
                has Workers, all others have Communication.
            tokens_per_sample: the length of each sample. The default meters then measure tokens per second.

        Raises:
            ConfigError: `steps` is below 1.
        """
        if steps < 1:
            raise ConfigError(f"Record every {steps} steps: the number must be at least 1")
        self._steps = steps
        self._meters = list(meters) if meters is not None else None
        self._throughput = Throughput(tokens_per_sample=tokens_per_sample)
        self._outputs = [_Output(writer) for writer in writers]
        self._is_open = False
        self._has_rows = False  # True: the record was open in an earlier World of this run
        self._num_measured = 0  # steps since the last row
        self._samples = self._seconds = 0.0
        self._restored: Mapping[str, Any] = {}
        self._events: list[RunEvent] = []  # since the last row
        self._document: RunDocument | None = None  # of this run, on rank 0
        self._process = self._name = ""  # of rank 0, as in the document; of this rank
        self._handled: BaseException | None = None  # the exception that the caller of the run is handling
        self._is_done = False  # the last step is made

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return any(meter.reads_model for meter in self._meters or ())

    def before_run(self, trainer: Trainer) -> None:
        """See Hook.

        Raises:
            ConfigError: an Evaluation comes after this hook. Raised on every rank.
        """
        if any(isinstance(hook, Evaluation) for hook in trainer.hooks[trainer.hooks.index(self) :]):
            raise ConfigError("Record must come after Evaluation, whose results it writes; change their order")
        self._handled = sys.exception()
        self._is_done = False

    def before_step(self, trainer: Trainer) -> None:
        """See Hook.

        Raises:
            MpitrainError: a writer cannot begin, because its files cannot be made or read. Raised on every rank.
        """
        if not self._is_open:  # not in before_run: a later hook may resume there, and the step is known only then
            self._open(trainer, trainer.step_number)
        if self._ends_row(trainer, trainer.step_number + 1):
            for meter in self._measuring:
                meter.before_row(trainer)

    def _open(self, trainer: Trainer, after_step: int) -> None:
        world = trainer.world
        with world.together("open the record"):
            if world.is_root:
                folders = [hook.directory for hook in trainer.hooks if isinstance(hook, Checkpoint)]
                document = document_of(world, type(trainer.strategy).__name__, after_step, folders)
                self._document = replace(document, steps=trainer.last_step or 0, orders=self._orders())
                for output in self._outputs:
                    output.open(after_step)
                    output.describe(self._document)
                self._publish_folder()
        meters = self._meters
        if meters is None:
            exchange = Workers() if trainer.served else Communication()
            meters = [Loss(), LearningRate(), GradientNorm(), self._throughput, exchange, Memory()]
            if any(world.allgather(gpu_of(trainer) is not None)):
                meters.append(GpuUtilisation())
        self._restore_meters(meters)
        reasons = [meter.start(trainer) for meter in meters]
        self._measuring = [meter for meter, reason in zip(meters, reasons, strict=True) if not reason]
        told = world.allgather((reasons, self._document.process if self._document else ""))
        self._process, self._name = told[0][1], world.name()
        of_all = [of_rank for of_rank, _ in told]
        for name, *of_ranks in zip([type(meter).__name__ for meter in meters], *of_all, strict=True):
            without = [f"{world.name(rank)}: {reason}" for rank, reason in enumerate(of_ranks) if reason]
            if without and world.is_root:
                on = f"{len(without)} of {world.size} ranks" if world.size > 1 else "this rank"
                print(f"mpitrain: {name} is not recorded on {on}. {without[0]}", file=sys.stderr, flush=True)
        self._all_meters = meters
        self._begun = time.monotonic()
        self._is_open = True  # last: if a rank is lost in this method, all of it is repeated

    def _publish_folder(self) -> None:
        """Publish the record's folder for programs that watch the job: that of the first JSON writer, if there is
        one."""
        writers = sorted((output.writer for output in self._outputs), key=lambda one: not isinstance(one, JsonLines))
        if writers and (activity := own_activity()):
            activity.keep_record(str(Path(str(writers[0])).absolute().parent))

    def _ends_row(self, trainer: Trainer, number: int) -> bool:
        return number % self._steps == 0 or number == trainer.last_step

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        if not self._is_open:  # the World has changed in this step, whose row an earlier root may have written
            self._open(trainer, step.number - 1)
        for meter in self._measuring:
            meter.after_step(trainer, step)
        self._num_measured += 1
        self._samples += step.samples
        if self._ends_row(trainer, step.number):
            self._write_row(trainer)
        elif names := ", ".join(trainer.metrics):
            # Ranks without these would be in another call.
            trainer.world.agree(f"a row of the record for {names:.200}, which every rank must report (Trainer.report)")
            self._write_row(trainer)

    def world_changed(self, trainer: Trainer) -> None:
        """See Hook. The writers continue where another rank may have stopped, and the meters start again."""
        self._has_rows = self._has_rows or self._is_open
        state = self.state()
        self._close_outputs()
        self.restore(state)

    def went_on(self, trainer: Trainer, event: RunEvent) -> None:
        """See Hook. A pause does not count as training time."""
        self._events.append(event)
        if event.source == "told" and self._is_open:
            self._begun += event.seconds
            self._describe(orders=self._orders())  # at once: the next row may never come

    def after_run(self, trainer: Trainer) -> None:
        """See Hook. If a hook after this one has ended the run, write the last row here."""
        self._is_done = True
        if not self._num_measured or not (self._is_open or self._has_rows):
            return  # nothing is new, or the run had ended before its first step
        if not self._is_open:  # the World has changed in this call
            self._open(trainer, trainer.step_number - 1)
        self._write_row(trainer)

    def _write_row(self, trainer: Trainer) -> None:
        self._num_measured = 0
        readings = {name: reading for meter in self._measuring for name, reading in meter.read(trainer).items()}
        reported = dict(trainer.metrics)
        measured = combine(trainer.world.allgather(readings))
        trainer.report(measured)
        if taken := [name for name in trainer.metrics if name in _FIRST]:
            raise everywhere(
                ConfigError(
                    f"step {trainer.step_number}: the metric {taken[0]!r} was reported; each row begins with "
                    f"{', '.join(_FIRST)}. Give it another name"
                )
            )
        events, self._events = self._events, []
        if not trainer.world.is_root:
            return
        seconds = self._seconds + time.monotonic() - self._begun
        first = (trainer.step_number, trainer.data.epoch + 1, self._samples, seconds)
        row: Row = {**dict(zip(_FIRST, first, strict=True)), **measured, **reported}
        if trainer.copy_steps:
            row = {**row, "copy_steps": trainer.copy_steps}
        outer_steps = trainer.strategy.num_outer_steps
        if outer_steps is not None:
            row = {**row, OUTER_STEPS: outer_steps}
        for output in self._outputs:
            output.write(row, events, trainer.world.name())

    def close(self) -> None:
        """See Hook."""
        error = sys.exception()
        has_failed = not (self._is_done or error is None or error is self._handled)
        failure = "" if error is None else _failure(error)
        if self._is_open and self._document is None and has_failed and not getattr(error, "known_everywhere", False):
            has = "" if isinstance(error, SystemExit) else "failed: "
            for output in self._outputs:  # this rank ends rank 0, wherever that is
                output.note_end(self._process, f"{self._name} {has}{failure}")
        if self._is_open and self._document is not None:
            end = failure if has_failed else DONE if self._is_done else LEFT
            self._document = self._document.ended_now(end)
            if has_failed and error is not None and is_of_another_rank(error):
                for output in self._outputs:
                    output.end_after_another(self._process, self._document)
            else:
                self._describe(orders=self._orders())
        self._close_outputs()

    def _orders(self) -> list[dict[str, Any]]:
        """The commands that the training received since the last row."""
        return [event.plain() for event in self._events if event.source == "told"]

    def _describe(self, **changes: Any) -> None:
        """Update rank 0's document of the run."""
        if self._document is not None:
            self._document = replace(self._document, **changes)
            for output in self._outputs:
                with suppress(OSError):  # the rows matter more, and a missing end is visible
                    output.describe(self._document)

    def _close_outputs(self) -> None:
        for output in self._outputs:
            output.close()
        self._is_open = False
        self._document = None

    def state(self) -> dict[str, Any]:
        """See Hook."""
        since = time.monotonic() - self._begun if self._is_open else 0.0
        meters = {}
        if self._is_open:
            meters = {type(meter).__name__: state for meter in self._all_meters if (state := meter.state())}
        return {
            "samples": self._samples,
            "seconds": self._seconds + since,
            "num_measured": self._num_measured,
            "meters": meters or dict(self._restored),
            "events": [event.plain() for event in self._events],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Hook. The meters are restored when they are made."""
        try:
            samples, seconds = float(state["samples"]), float(state["seconds"])
            num_measured, restored = int(state["num_measured"]), dict(state.get("meters", {}))
            events = [RunEvent.from_plain(fields) for fields in state.get("events", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of Record is {dict(state)}; was it written by mpitrain?") from error
        self._samples, self._seconds, self._num_measured, self._restored = samples, seconds, num_measured, restored
        # Events are not undone. But if a rank is lost, the others repeat the commands that are not in the state yet.
        self._events = events + [
            one for one in self._events if one not in events and one.source not in ("told", "auto")
        ]

    def _restore_meters(self, meters: Sequence[Meter]) -> None:
        for meter in meters:
            if type(meter).__name__ in self._restored:
                meter.restore(self._restored[type(meter).__name__])


def _failure(error: BaseException) -> str:
    text = words_of_exit(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {text_of(error)}"
    return text.splitlines()[0]


class _Output:
    """A writer on rank 0, and the rows that it lacks."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._lacking: list[tuple[Row, Sequence[RunEvent]]] = []

    def open(self, after_step: int) -> None:
        # The steps after it are repeated, and have new rows.
        self._lacking = [(row, events) for row, events in self._lacking if row["step"] <= after_step]
        self.writer.open(after_step)

    def describe(self, document: RunDocument) -> None:
        if isinstance(self.writer, DescribingWriter):
            self.writer.describe(document)

    def note_end(self, process: str, end: str) -> None:
        if isinstance(self.writer, JsonLines):
            with suppress(OSError):
                self.writer.note_end(process, end)

    def end_after_another(self, process: str, document: RunDocument) -> None:
        """Describe the end of a run that another rank has ended: that rank has noted the reason."""
        if isinstance(self.writer, JsonLines):
            self.note_end(process, document.end)
        else:
            with suppress(OSError):
                self.describe(document)

    def write(self, row: Row, events: Sequence[RunEvent], name: str) -> None:
        self._lacking.append((row, events))
        was_well = len(self._lacking) == 1
        try:
            self._write_lacking()
        except OSError as error:
            if was_well:
                print(
                    f"mpitrain: {name}: {self.writer} cannot be written: {error}. Training continues; the next "
                    "row is written with all missing rows",
                    file=sys.stderr,
                    flush=True,
                )
            return
        if not was_well:
            print(f"mpitrain: {name}: {self.writer} is written again; no row is lost", file=sys.stderr, flush=True)

    def _write_lacking(self) -> None:
        if isinstance(self.writer, BatchingWriter):
            self.writer.write_all(self._lacking)
            self._lacking.clear()
        while self._lacking:
            self.writer.write(*self._lacking[0])
            del self._lacking[0]

    def close(self) -> None:
        with suppress(OSError):
            if self._lacking:
                self._write_lacking()
        if self._lacking:
            print(f"mpitrain: {self.writer} lacks its last {len(self._lacking)} rows", file=sys.stderr, flush=True)
        with suppress(OSError):  # the message above has reported the missing rows
            self.writer.close()
