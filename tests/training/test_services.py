"""What the writers for services have in common, without a service: names, the file of the run, what is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jobs import run_job
from mpitrain import RunEvent
from mpitrain.errors import DataError
from mpitrain.training.writers.mlflow import _allowed, _error_of, _missing
from mpitrain.training.writers.service import RunFile, ServiceNames, without_secrets


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
        "after step 11: rank 2 on lab1 was lost; 3 ranks went on from ranks after 0.05 s, 2 steps were repeated"
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


AWAY = """
import numpy
import mpitrain as mt


class Away:
    calls = []

    def __str__(self):
        return "the service"

    def open(self, after_step): ...

    def close(self): ...

    def write(self, row, events=()):
        self.write_all([(row, events)])

    def write_all(self, rows):
        steps = [row["step"] for row, _ in rows]
        self.calls.append(steps)
        if 3 <= steps[-1] <= 5 or self.calls.count([8]) == 1 and steps == [8]:
            raise ConnectionError("no answer")


def build(world):
    def function(parameters, batch, on_gradient):
        on_gradient("w", numpy.zeros(1))
        return 1.0

    data = mt.data.ArrayData(world, [numpy.arange(13.0)], global_batch=5)
    return mt.Parts(mt.ArrayFunction(function, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(), data)


mt.Trainer(build, [mt.StopAtStep(8), mt.Record([Away()], steps=1)]).run()
mt.init().print(Away.calls)
"""


def test_the_rows_of_an_outage_come_at_once_and_the_last_ones_at_the_end() -> None:
    job = run_job(2, AWAY)
    assert (job.code, job.left) == (0, []), job.output
    assert job.stdout == "[[1], [2], [3], [3, 4], [3, 4, 5], [3, 4, 5, 6], [7], [8], [8]]\n"
    said = [line for line in job.stderr.splitlines() if "the service" in line]
    assert [line.partition("the service ")[2].partition(":")[0] for line in said] == [
        "cannot be written",
        "is written again; no row is lost",
        "cannot be written",
    ]
