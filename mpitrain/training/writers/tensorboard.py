"""Writes rows for TensorBoard. No other module imports tensorboardX."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.extras import missing
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.writer import Row


class TensorBoard:
    """A Writer of event files, with a scalar for each name of a row, at the step of the row.

    A run that resumes begins a new file, with the mark that makes TensorBoard ignore later steps in older files.
    """

    def __init__(self, directory: Path | str) -> None:
        """`directory` is the folder for `tensorboard --logdir`, or one below. It is made if it is missing.

        Raises:
            ConfigError: tensorboardX is not installed.
        """
        try:
            import tensorboardX.event_file_writer
            import tensorboardX.proto.event_pb2
            import tensorboardX.proto.summary_pb2
        except ImportError as error:
            raise missing("TensorBoard", "tensorboardX", "tensorboard", error) from None
        # Do not use SummaryWriter: it writes from a thread, which does not report a full disk, and it starts a process.
        self._make_file = tensorboardX.event_file_writer.EventsWriter
        self._events, self._summaries = tensorboardX.proto.event_pb2, tensorboardX.proto.summary_pb2
        self._directory = Path(directory)
        self._file: Any = None
        self._buffered = 0.0  # the step of the last row that was added

    def __str__(self) -> str:
        return str(self._directory)

    def open(self, after_step: int) -> None:
        """See Writer."""
        self._directory.mkdir(parents=True, exist_ok=True)
        # tensorboardX puts only the second into the name, and two runs may begin in the same second.
        self._file = self._make_file(str(self._directory / "events"), f".{time.time_ns()}.{os.getpid()}")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(step=after_step + 1, session_log=start)
        self._file.flush()

    def write(self, row: Row, events: Sequence[RunEvent] = ()) -> None:
        """See Writer. Events are left out."""
        if row["step"] != self._buffered:  # after a full disk, the buffer still holds the row that was not written
            self._add_row(row)
        self._file.flush()

    def _add_row(self, row: Row) -> None:
        self._buffered = row["step"]
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in row.items() if name != "step"
        ]
        self._add(step=int(row["step"]), summary=self._summaries.Summary(value=values))

    def _add(self, **event: Any) -> None:
        self._file.write_event(self._events.Event(wall_time=time.time(), **event))

    def close(self) -> None:
        """See Writer."""
        if self._file is not None:
            self._file.close()
            self._file = None
