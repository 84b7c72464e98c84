"""The common part of writers for a service that stores runs, such as MLflow.

The calls of a ServiceWriter reach its ServiceRun through ServiceCalls, so that the caller does not wait long for a
service that does not answer. RunFile maps a record to the service's run, and ServiceNames maps its names.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol

from mpitrain.errors import ConfigError, DataError
from mpitrain.reading import find_file, json_of
from mpitrain.training.run_document import RunDocument
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.writer import Row, replace_file

# How long the caller waits in each outage of the service, and once more at the end of a run. A call that succeeds ends
# an outage.
PATIENCE_SECONDS = 10.0
# Up to the last @, because a password may contain one. If no blank follows in a library's text, more is cut off.
_USER = re.compile(r"://[^\s'\"<>]*@")


class ServiceRun(Protocol):
    """A run stored by a service. Its methods are called one after the other, but from several threads.

    They raise OSError if the service does not answer, and ConfigError if it refuses. After an error they may be called
    again.
    """

    def begin(self) -> None:
        """Create the run, or continue the one that the directory names. Does nothing after a success."""

    def describe(self, document: RunDocument) -> None:
        """Store the description of the run."""

    def write(self, rows: Sequence[tuple[Row, Sequence[RunEvent]]]) -> None:
        """Store rows, except those of steps that the service already has."""

    def finish(self, document: RunDocument | None) -> None:
        """Report that the process has ended, with the run's document. None: the run continues."""


class ServiceWriter:
    """A Writer for a service. The service has one run for each training, which `FILE` in the directory names.

    A training that resumes continues its run. No service can remove a row. So rows of steps that the run already has
    are not written again: the first version stays.
    """

    SERVICE: ClassVar[str]  # for messages
    FILE: ClassVar[str]
    LIBRARY: ClassVar[str]  # as it is imported
    EXTRA: ClassVar[str]  # of mpitrain, which installs it

    def __init__(self, directory: Path | str, *, name: str = "") -> None:
        """
        Args:
            directory: of the record. It is created if it is missing. Rank 0 writes there.
            name: of a new run; "": that of the directory.

        Raises:
            ConfigError: the library is not installed.
        """
        self._directory = Path(directory)
        self._name = name or self._directory.resolve().name
        self._calls = ServiceCalls(self.SERVICE)
        self._run: ServiceRun | None = None
        self._document: RunDocument | None = None  # the newest
        self._described: RunDocument | None = None  # the version that the service has
        if importlib.util.find_spec(self.LIBRARY) is None:
            raise ConfigError(
                f"{type(self).__name__} needs {self.LIBRARY}, which is not installed; "
                f"pip install 'mpitrain[{self.EXTRA}]'"
            )

    def __str__(self) -> str:
        return str(self._directory / self.FILE)

    def _make_run(self, after_step: int) -> ServiceRun:
        """Return the run of a training that continues after this step, without a call to the service."""
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
            with suppress(Exception):  # the rows matter more, and a missing end is visible
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
        """Make a call, after the calls that must precede it."""
        run, document = self._run, None if self._described is self._document else self._document
        assert run is not None

        def all_of_it() -> None:
            run.begin()
            if document is not None:
                run.describe(document)
                self._described = document  # there may be a newer one by now
            call()

        self._calls.get(all_of_it)


@contextmanager
def _only_os_errors() -> Iterator[None]:
    """Convert any error of a library to OSError, so that the training continues and Record reports the reason."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(without_secrets(f"{type(error).__name__}: {error}")) from error


def without_secrets(text: str) -> str:
    """Return a text without the user and the password that a URI in it may have."""
    return _USER.sub("://", text)


class ServiceCalls:
    """Makes calls one after the other, each in its own thread. Only one thread may use this object.

    A call that is not answered in time continues in its thread: libraries retry for minutes, and cannot be interrupted.
    Its thread ends with the process.
    """

    def __init__(self, service: str) -> None:
        """`service` is a name for messages."""
        self._service = service
        self._patience = PATIENCE_SECONDS  # the rest of it in this outage
        self._thread: threading.Thread | None = None
        self._begun = 0.0
        self._error: BaseException | None = None  # of the last call that has ended

    def get(self, call: Callable[[], None]) -> None:
        """Make a call, and return when it has ended.

        Raises:
            TimeoutError: the call has not ended yet, or was not made because the previous one has not ended.
            Exception: whatever the call raises.
        """
        self._wait()
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._make, args=(call,), name=self._service, daemon=True)
        self._thread.start()
        self._wait()
        if self._error is not None:
            raise self._error

    def _make(self, call: Callable[[], None]) -> None:
        self._error = None
        try:
            call()
        except Exception as error:
            self._error = error

    def _wait(self) -> None:
        if self._thread is None:
            return
        waits = time.monotonic()
        self._thread.join(self._patience)
        self._patience = max(0.0, self._patience - (time.monotonic() - waits))
        if self._thread.is_alive():
            self._patience = 0.0
            waited = time.monotonic() - self._begun
            raise TimeoutError(f"{self._service} has not answered for {waited:.0f} s")
        if self._error is None:
            self.renew_patience()

    def renew_patience(self) -> None:
        """Wait for the service again, although it has not answered before."""
        self._patience = PATIENCE_SECONDS


class ServiceNames:
    """The service's names for the names in rows. No two are equal."""

    def __init__(self, translate: Callable[[str], str]) -> None:
        """`translate` returns a name that the service allows, with room for some more characters."""
        self._translate = translate
        self._names: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the name at the service. If another name has taken it, it gets a number."""
        if name not in self._names:
            translated = chosen = self._translate(name)
            number = 1
            while chosen in self._names.values():
                number += 1
                chosen = f"{translated} {number}"
            self._names[name] = chosen
        return self._names[name]


class RunFile:
    """A file beside the record, with the id of the run and what its writer must remember."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, after_step: int) -> dict[str, Any]:
        """Return the content for a training that continues after this step; {}: there is none.

        Raises:
            DataError: the file is damaged.
        """
        if after_step == 0:
            return {}

        def refusal(said: str) -> DataError:
            return DataError(f"{said}; remove it to begin a new run")

        content = find_file(self._path, refusal)
        if content is None:
            return {}
        kept = json_of(content, refusal, str(self._path), any_text=True)
        if not isinstance(kept.get("run"), str):
            raise refusal(f"{self._path} is damaged: it names no run")
        return kept

    def keep(self, kept: dict[str, Any]) -> None:
        """Write the file. `kept` has the id of the run as `run`."""
        replace_file(self._path, json.dumps(kept).encode() + b"\n")
