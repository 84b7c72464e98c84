"""Writers for a service that keeps runs, such as MLflow: what does not depend on the service."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Protocol

from mpitrain.errors import ConfigError
from mpitrain.training.run_document import RunDocument
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.service_calls import ServiceCalls
from mpitrain.training.writers.writer import Row

# To the last @, because a password may have one. Where a library's text has no blank behind it, more is cut off.
_USER = re.compile(r"://[^\s'\"<>]*@")


class ServiceRun(Protocol):
    """A run that a service keeps. Its methods are called one after the other, but from several threads.

    They raise OSError if the service does not answer, and ConfigError if it refuses. After an error they may be called
    again.
    """

    def begin(self) -> None:
        """Make the run, or go on with the one that the directory names. Does nothing after a success."""

    def describe(self, document: RunDocument) -> None:
        """Store what the run is."""

    def write(self, rows: Sequence[tuple[Row, Sequence[RunEvent]]]) -> None:
        """Store rows, but none of a step that the service has already."""

    def finish(self, document: RunDocument | None) -> None:
        """Say that the process has ended with the run. None: the run goes on."""


class ServiceWriter:
    """A Writer for a service. The service has a run for each training; `FILE` in the directory says which.

    A training that resumes goes on with its run. No service can remove a row. So rows of steps that the run has already
    are not written again: it keeps those of the first time.
    """

    SERVICE: ClassVar[str]  # for messages
    FILE: ClassVar[str]
    LIBRARY: ClassVar[str]  # as it is imported
    EXTRA: ClassVar[str]  # of mpitrain, which brings it

    def __init__(self, directory: Path | str, *, name: str = "") -> None:
        """
        Args:
            directory: of the record. It is made if it is missing. Rank 0 writes there.
            name: of a new run; "": that of the directory.

        Raises:
            ConfigError: the library is not installed.
        """
        self._directory = Path(directory)
        self._name = name or self._directory.resolve().name
        self._calls = ServiceCalls(self.SERVICE)
        self._run: ServiceRun | None = None
        self._document: RunDocument | None = None  # the newest
        self._described: RunDocument | None = None  # what the service has
        if importlib.util.find_spec(self.LIBRARY) is None:
            raise ConfigError(
                f"{type(self).__name__} needs {self.LIBRARY}, which is not installed; "
                f"pip install 'mpitrain[{self.EXTRA}]'"
            )

    def __str__(self) -> str:
        return str(self._directory / self.FILE)

    def _make_run(self, after_step: int) -> ServiceRun:
        """Return the run of a training that goes on after this step, without a call to the service."""
        raise NotImplementedError

    def open(self, after_step: int) -> None:
        """See Writer. If the service does not answer, the next row tries again.

        Raises:
            ConfigError: the service refuses the run.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = self._make_run(after_step)
        self._document = self._described = None
        with suppress(TimeoutError, ConnectionError):
            self._get(lambda: None)

    def describe(self, document: RunDocument) -> None:
        """See DescribingWriter. If the service does not answer, the next row tries again.

        Raises:
            ConfigError: the service refuses it, and the run has not ended.
        """
        self._document = document
        if document.ended is not None:
            self._calls.renew_patience()
            with suppress(Exception):  # the rows matter more, and a missing end is seen
                self._get(lambda: None)
            return
        with suppress(TimeoutError, ConnectionError):
            self._get(lambda: None)

    def write(self, row: Row, events: Sequence[RunEvent] = ()) -> None:
        """See Writer."""
        self.write_all([(row, events)])

    def write_all(self, rows: Sequence[tuple[Row, Sequence[RunEvent]]]) -> None:
        """See BatchingWriter."""
        assert self._run is not None
        run, rows = self._run, list(rows)
        with _only_os_errors():
            self._get(lambda: run.write(rows))

    def close(self) -> None:
        """See Writer."""
        run, self._run = self._run, None
        if run is not None:
            document = self._document
            with _only_os_errors():
                self._calls.get(lambda: run.finish(document))

    def _get(self, call: Callable[[], None]) -> None:
        """Make a call after what it presupposes."""
        run, document = self._run, None if self._described is self._document else self._document
        assert run is not None

        def all_of_it() -> None:
            run.begin()
            if document is not None:
                run.describe(document)
                self._described = document  # the newest may be another one by now
            call()

        self._calls.get(all_of_it)


@contextmanager
def _only_os_errors() -> Iterator[None]:
    """Whatever a library raises in the middle of a training, the training goes on, and Record says why."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(without_secrets(f"{type(error).__name__}: {error}")) from error


def without_secrets(text: str) -> str:
    """Return a text without the user and the password that a URI in it may have."""
    return _USER.sub("://", text)
