"""The writer for a service, with a run in place of any library: outages, what the run is, errors, the end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS
from mpitrain import RunEvent
from mpitrain.errors import ConfigError
from mpitrain.training.hooks.record import _Output
from mpitrain.training.run_document import DONE, RunDocument
from mpitrain.training.writers import service
from mpitrain.training.writers.service import ServiceRun, ServiceWriter
from mpitrain.training.writers.writer import Row

DOCUMENT = RunDocument("", "a.py", [], "/", {"a": [0]}, "Sync", {}, "3.11", {}, "", False, "a", 0, 1.0, 1.0)


class FakeRun:
    """Keeps what it is told. `fails` is raised by each call; while `answers` is not set, calls hang."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def _call(self, what: Any) -> None:
        self.answers.wait()
        if self.fails is not None:
            raise self.fails
        self.calls.append(what)

    def begin(self) -> None:
        self._call("begin")

    def describe(self, document: RunDocument) -> None:
        self._call(document.end or "describe")

    def write(self, rows: Sequence[tuple[Row, Sequence[RunEvent]]]) -> None:
        self._call([row["step"] for row, _ in rows])

    def finish(self, document: RunDocument | None) -> None:
        self._call(("finish", document and document.end))


class FakeWriter(ServiceWriter):
    SERVICE = "the service"
    FILE = "fake.json"
    LIBRARY = EXTRA = "json"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.made = FakeRun()

    def _make_run(self, after_step: int) -> ServiceRun:
        return self.made

    def taken(self) -> list[Any]:
        """What the run was told since the last look, without the beginnings."""
        calls, self.made.calls = self.made.calls, []
        return [call for call in calls if call != "begin"]


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWriter:
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)  # for a busy machine
    return FakeWriter(tmp_path / "new")


def test_an_outage_when_it_begins(writer: FakeWriter) -> None:
    """The training goes on, and the first row that the service takes brings what it lacks. A refusal ends the run."""
    writer.made.fails = ConnectionError("no answer")
    writer.open(0)
    writer.describe(DOCUMENT)
    with pytest.raises(ConnectionError, match="no answer"):
        writer.write({"step": 1})
    assert writer.made.calls == []
    writer.made.fails = None
    writer.write_all([({"step": 1}, ()), ({"step": 2}, ())])
    assert writer.taken() == ["describe", [1, 2]]
    writer.write({"step": 3})
    assert writer.taken() == [[3]]
    writer.made.fails = ConfigError("refused")
    with pytest.raises(ConfigError, match="refused"):
        writer.open(0)


def test_what_the_run_is_comes_late(writer: FakeWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ends late has sent the old document; the newest one is sent all the same."""
    writer.open(0)
    writer.made.answers.clear()
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.0)
    writer.describe(DOCUMENT)
    old = writer._calls._thread
    writer.describe(dataclasses.replace(DOCUMENT, end="left"))
    assert writer.made.calls == ["begin"]
    writer.made.answers.set()
    assert old is not None
    old.join()
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)
    writer.write({"step": 1})
    assert writer.taken() == ["describe", "left", [1]]


def test_a_document_that_comes_while_another_one_is_sent(writer: FakeWriter) -> None:
    class Newer(FakeRun):
        def describe(self, document: RunDocument) -> None:
            super().describe(document)
            if not document.end:
                writer._document = dataclasses.replace(DOCUMENT, ended=2.0, end=DONE)

    writer.made = Newer()
    writer.open(0)
    writer.describe(DOCUMENT)
    writer.write({"step": 1})
    assert writer.taken() == ["describe", DONE, [1]]


@pytest.mark.parametrize("error", [ValueError("wrong"), ConfigError("wrong"), KeyError("wrong")])
def test_an_error_of_any_class_ends_no_training(writer: FakeWriter, error: Exception) -> None:
    writer.open(0)
    writer.made.fails = error
    with pytest.raises(OSError, match=rf"^{type(error).__name__}: .*wrong"):
        writer.write({"step": 1})
    with pytest.raises(OSError, match=rf"^{type(error).__name__}: .*wrong"):
        writer.close()


def test_no_password_is_in_an_error(writer: FakeWriter) -> None:
    writer.open(0)
    writer.made.fails = ValueError("GET http://ada:SECRET@lab1/api: 500, http://lab2/api")
    with pytest.raises(OSError, match=r"^ValueError: GET http://lab1/api: 500, http://lab2/api$"):
        writer.write({"step": 1})


def test_the_end_in_an_outage(writer: FakeWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long, and no error hides that of the training."""
    writer.open(0)
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.05)
    writer._calls.renew_patience()
    writer.made.answers.clear()
    with pytest.raises(TimeoutError, match="the service has not answered"):
        writer.write({"step": 1})
    writer.describe(dataclasses.replace(DOCUMENT, ended=2.0, end=DONE))
    with pytest.raises(TimeoutError, match="the service has not answered"):
        writer.close()
    writer.close()  # nothing is open any more
    writer.made.answers.set()


def test_rows_that_are_made_again_are_not_written_twice(writer: FakeWriter) -> None:
    """The ranks go on from step 2, in an outage since step 2."""
    output = _Output(writer)
    output.open(0)
    writer.made.fails = ConnectionError("no answer")
    for step in (2, 3, 4):
        output.write({"step": step}, (), "rank 0")
    output.close()
    writer.made.fails = None
    output.open(2)
    output.write({"step": 3}, (), "rank 0")
    assert writer.taken() == [[2, 3]]
