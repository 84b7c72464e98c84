"""What the writers for services have in common, without a service: names, files, outages, errors, the end."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

import mpitrain as mt
from jobs import HANG_SECONDS, run_job
from mpitrain import RunEvent
from mpitrain.errors import ConfigError, DataError
from mpitrain.training.hooks.record import _Output
from mpitrain.training.run_document import DONE, RunDocument
from mpitrain.training.writers import service
from mpitrain.training.writers.mlflow import _allowed, _error_of, _missing
from mpitrain.training.writers.service import (
    RunFile,
    ServiceCalls,
    ServiceNames,
    ServiceRun,
    ServiceWriter,
    without_secrets,
)
from mpitrain.training.writers.writer import Row


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("test accuracy", "test accuracy"),
        ("a/b.c-d:e_f", "a/b.c-d:e_f"),
        ("test, (top-5) %", "test_ _top-5_ _"),
        ("größe", "größe"),
        ("/a//b/./../c/", "a/b/c"),
        ("..", "_"),
        ("", "_"),
        ("x" * 239 + "/yy", "x" * 239),
        ("x" * 300, "x" * 240),
    ],
)
def test_names_for_mlflow(name: str, allowed: str) -> None:
    assert _allowed(name) == allowed


def test_no_two_names_become_the_same() -> None:
    names = ServiceNames(_allowed)
    given = ["a,b", "a;b", "a_b", "a_b 2", "a,b"]
    assert [names.of(name) for name in given] == ["a_b", "a_b 2", "a_b 3", "a_b 2 2", "a_b"]


def test_the_file_of_a_run(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "service.json")
    assert file.read(5) == {}
    file.keep({"run": "7", "step": 3})
    assert file.read(5) == {"run": "7", "step": 3}
    assert file.read(0) == {}  # another training begins
    assert json.loads((tmp_path / "service.json").read_text()) == {"run": "7", "step": 3}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": 7}', "\0", '{"run": "a"'])
def test_a_damaged_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "service.json").write_text(text)
    with pytest.raises(DataError, match=r"service\.json is damaged: .*; remove it to begin a new run"):
        RunFile(tmp_path / "service.json").read(5)


def test_events_in_a_line() -> None:
    lost = RunEvent(11, "rank 2 on lab1 was lost", "ranks", (2,), 3, 0.054, repeated_steps=2)
    told = RunEvent(4, "the run ends, and is saved", "told", (), 3, 0.0, teller="ada on lab1", at=1.0)
    assert lost.line() == (
        "after step 11: rank 2 on lab1 was lost; 3 ranks continued from ranks after 0.05 s, 2 steps were repeated"
    )
    assert told.line() == "after step 4: the run ends, and is saved (ada on lab1)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ada:SECRET@lab1/x", "postgresql://lab1/x"),
        ("postgresql://ada:SE/CR@ET@lab1:5432/x is away", "postgresql://lab1:5432/x is away"),
        ("'http://SECRET@lab1/a' and http://ada:SECRET@lab2", "'http://lab1/a' and http://lab2"),
        ("sqlite:////home/ada/mlflow.db", "sqlite:////home/ada/mlflow.db"),
        ("ask ada@lab1 for http://lab1/x", "ask ada@lab1 for http://lab1/x"),
    ],
)
def test_no_user_and_password_in_a_message(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize(("code", "begin"), [("INTERNAL_ERROR", "MLflow does not answer"), ("NONE", "It refuses")])
def test_no_user_and_password_of_mlflow(code: str, begin: str) -> None:
    class LibraryError(Exception):
        error_code = code

    error = _error_of(LibraryError("API request to http://ada:SECRET@lab1/api failed"), "It refuses")
    assert str(error) == f"{begin}: API request to http://lab1/api failed"


def test_what_brings_a_missing_module() -> None:
    assert _missing(ImportError(name="alembic")) == "alembic, which is not installed; pip install 'mpitrain[mlflow]'"
    missing = _missing(ImportError(name="psycopg2"))
    assert missing == "the module psycopg2, which is not installed; install the package that has it"


MISSING = """
import importlib.util, sys
import mpitrain as mt
world = mt.init()
for make, library in ((mt.writers.Mlflow, "mlflow"), (mt.writers.Wandb, "wandb")):
    if importlib.util.find_spec(library) is None:
        try:
            make(sys.argv[1])
        except mt.errors.MpitrainError as error:
            said = world.allgather(str(error))
            world.print(said)
assert not {"mlflow", "wandb"} & set(sys.modules)
"""


def test_a_library_that_is_not_installed_is_named_on_every_rank(tmp_path: Path) -> None:
    """And neither importing mpitrain nor making a writer loads it."""
    job = run_job(2, MISSING, str(tmp_path / "new"))
    assert (job.code, job.left) == (0, []), job.output
    expected: list[Any] = [
        [f"{name} needs {library}, which is not installed; pip install 'mpitrain[{library}]'"] * 2
        for name, library in (("Mlflow", "mlflow"), ("Wandb", "wandb"))
        if importlib.util.find_spec(library) is None
    ]
    assert job.stdout == "".join(f"{said}\n" for said in expected)
    assert not (tmp_path / "new").exists()


class Away:
    """A service that does not answer from step 3 to 5, and once in step 8."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []

    def __str__(self) -> str:
        return "the service"

    def open(self, after_step: int) -> None: ...

    def close(self) -> None: ...

    def write(self, row: Row, events: Sequence[RunEvent] = ()) -> None:
        self.write_all([(row, events)])

    def write_all(self, rows: Sequence[tuple[Row, Sequence[RunEvent]]]) -> None:
        self.calls.append(steps := [row["step"] for row, _ in rows])
        if 3 <= steps[-1] <= 5 or (steps == [8] and self.calls.count([8]) == 1):
            raise ConnectionError("no answer")


def test_the_rows_of_an_outage_come_at_once_and_the_last_ones_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    def build(world: mt.World) -> mt.Parts:
        data = mt.data.ArrayData(world, [numpy.arange(13.0)], global_batch=5)
        model = mt.ArrayFunction(
            lambda _, __, put: put("w", numpy.zeros(1)) or 1.0, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)
        )
        return mt.Parts(model, mt.Sync(), data)

    away = Away()
    mt.Trainer(build, [mt.StopAtStep(8), mt.Record([away], steps=1)]).run()
    assert away.calls == [[1], [2], [3], [3, 4], [3, 4, 5], [3, 4, 5, 6], [7], [8], [8]]
    said = [line for line in capfd.readouterr().err.splitlines() if "the service" in line]
    assert [line.partition("the service ")[2].partition(":")[0] for line in said] == [
        "cannot be written",
        "is written again; no row is lost",
        "cannot be written",
    ]


def test_what_a_call_raises_is_raised() -> None:
    calls = ServiceCalls("service")
    made: list[int] = []

    def refuse() -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        calls.get(refuse)
    calls.get(lambda: made.append(threading.get_ident()))
    assert made
    assert made != [threading.get_ident()]


def test_an_outage_is_waited_for_once_and_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that hangs continues by itself; the others are not made before it has ended."""
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.2)
    calls, made, answered = ServiceCalls("service"), [], threading.Event()

    def seconds_of(call: Callable[[], object]) -> float:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"^service has not answered for \d+ s$"):
            calls.get(lambda: made.append(call()))
        return time.monotonic() - begun

    def hang() -> int:
        answered.wait()
        return 1

    assert seconds_of(hang) >= 0.2
    assert calls._patience == 0.0  # so that these do not wait
    for _ in range(100):
        seconds_of(lambda: 2)
    calls.renew_patience()
    assert seconds_of(lambda: 3) >= 0.2
    assert made == []
    answered.set()
    assert calls._thread is not None
    calls._thread.join()
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)
    calls.renew_patience()
    calls.get(lambda: made.append(4))
    assert made == [1, 4]
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.2)
    answered.clear()
    assert seconds_of(hang) >= 0.2  # it has answered, so this is another outage
    answered.set()


def test_calls_that_fail_late_share_one_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a gateway that answers with an error after some seconds. A success gives the patience back."""
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)
    calls, left = ServiceCalls("service"), [HANG_SECONDS]

    def fail() -> None:
        time.sleep(0.05)
        raise ConnectionError("no answer")

    for _ in range(3):
        with pytest.raises(ConnectionError, match="no answer"):
            calls.get(fail)
        assert calls._patience < left[-1]
        left.append(calls._patience)
    calls.get(lambda: None)
    assert calls._patience == HANG_SECONDS


def test_an_old_call_that_fails_while_the_next_one_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has what this wait has left."""
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)
    calls, answered, left = ServiceCalls("service"), threading.Event(), list[float]()

    def fail() -> None:
        answered.wait()
        raise ConnectionError("no answer")

    calls._patience = 0.0
    with pytest.raises(TimeoutError):
        calls.get(fail)
    calls.renew_patience()
    threading.Timer(0.05, answered.set).start()
    calls.get(lambda: left.append(calls._patience))
    assert left[0] < HANG_SECONDS


def test_an_error_that_comes_late_is_not_that_of_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PATIENCE_SECONDS", 0.05)
    calls, answered = ServiceCalls("service"), threading.Event()

    def fail_late() -> None:
        answered.wait()
        raise ValueError("late")

    with pytest.raises(TimeoutError):
        calls.get(fail_late)
    answered.set()
    assert calls._thread is not None
    calls._thread.join()
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)
    calls.renew_patience()
    calls.get(lambda: None)


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
    """The training continues, and the first row that the service takes brings what it lacks. A refusal ends the run."""
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
    """The ranks continue from step 2, in an outage since step 2."""
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
