"""Writes rows to MLflow. No other module imports mlflow."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.training.run_document import DONE, LEFT, RunDocument
from mpitrain.training.run_event import RunEvent
from mpitrain.training.writers.service import RunFile, ServiceNames, ServiceRun, ServiceWriter, without_secrets
from mpitrain.training.writers.writer import Row

# The limits of MLflow (mlflow.utils.validation).
_MOST_METRICS, _MOST_PARAMS = 1000, 100
_MOST_NAME = 240  # of 250 characters: a number may follow
_REFUSED = re.compile(r"[^/\w.\- :]")
# Codes of errors after which a retry at another time may succeed.
_NO_ANSWER = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")


class Mlflow(ServiceWriter):
    """A Writer of runs of MLflow, with a metric for each name of a row, at the step of the row.

    The runs are stored at MLFLOW_TRACKING_URI or the URI of `mlflow.set_tracking_uri`, or else in `mlflow.db`, an
    SQLite database in the directory. The experiment is that of MLFLOW_EXPERIMENT_NAME, MLFLOW_EXPERIMENT_ID or
    `mlflow.set_experiment`. An active run of the script is neither used nor changed.

    The description of the run becomes parameters and tags; each event becomes a tag. In a name, each character that
    MLflow refuses becomes "_". MLflow's databases store infinity as the largest float, and -0.0 as 0.0.
    """

    SERVICE = "MLflow"
    FILE = "mlflow.json"
    LIBRARY = EXTRA = "mlflow"

    def _make_run(self, after_step: int) -> ServiceRun:
        return _MlflowRun(self._directory, self._name, after_step)


class _MlflowRun:
    """See ServiceRun."""

    def __init__(self, directory: Path, name: str, after_step: int) -> None:
        self._directory, self._name, self._after_step = directory, name, after_step
        self._file = RunFile(directory / Mlflow.FILE)
        self._names = ServiceNames(_allowed)
        self._client: Any = None
        self._id = ""
        self._last_step = 0.0  # of the rows in the run
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._times: dict[float, int] = {}  # of rows: MLflow considers two rows the same only if their times are equal

    def begin(self) -> None:
        if self._id:
            return
        import mlflow

        is_set = mlflow.is_tracking_uri_set()
        where = mlflow.get_tracking_uri() if is_set else f"sqlite:///{self._directory.resolve()}/mlflow.db"
        shown = f"MLflow at {without_secrets(where)}"
        kept = self._file.read(self._after_step)
        try:
            self._client = mlflow.MlflowClient(where)
            if not kept:
                run = self._client.create_run(_experiment(self._client), run_name=self._name)
                self._file.keep({"run": run.info.run_id})
            else:
                run = self._client.get_run(kept["run"])
                self._client.update_run(kept["run"], status="RUNNING")
        except ImportError as error:  # of the database
            raise ConfigError(f"{shown} needs {_missing(error)}") from None
        except mlflow.MlflowException as error:
            purpose = f" to continue with run {kept['run']} of {self._directory / Mlflow.FILE}" if kept else ""
            raise _error_of(error, f"{shown} refuses{purpose}") from None
        # data.metrics has no steps.
        self._last_step = max((float(metric.step) for metric in run.data.to_proto().metrics), default=0.0)
        self._params, self._tags = dict(run.data.params), dict(run.data.tags)
        self._id = run.info.run_id

    def describe(self, document: RunDocument) -> None:
        from mlflow.entities import Param, RunTag

        facts = _facts(document)
        new = [Param(name, value) for name, value in facts.items() if name not in self._params]
        # MLflow refuses another value for a parameter.
        changed = {
            f"{name} after step {document.after_step}": value
            for name, value in facts.items()
            if self._params.get(name, value) != value
        }
        tags = {
            "job": document.job,
            "hosts": json.dumps(document.hosts),
            "after_step": str(document.after_step),
            "end": document.end,
            **changed,
        }
        self._log(params=new[:_MOST_PARAMS], tags=[RunTag(name, value) for name, value in tags.items()])
        for begin in range(_MOST_PARAMS, len(new), _MOST_PARAMS):
            self._log(params=new[begin : begin + _MOST_PARAMS])
        self._params |= {param.key: param.value for param in new}

    def write(self, rows: Sequence[tuple[Row, Sequence[RunEvent]]]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics: list[Any] = []
        last_step = self._last_step
        for row, _ in rows:
            if row["step"] > last_step:
                last_step = row["step"]
                at = self._times.setdefault(row["step"], round(time.time() * 1000))
                metrics += [
                    Metric(self._names.of(name), float(value), at, int(row["step"]))
                    for name, value in row.items()
                    if name != "step"
                ]
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._log(metrics=metrics[begin : begin + _MOST_METRICS])
        self._last_step = last_step
        self._times = {}
        lines = dict.fromkeys(event.line() for _, events in rows for event in events)
        new = [line for line in lines if line not in self._tags.values()]
        number = sum(name.startswith("event ") for name in self._tags)
        tags = {f"event {number}": line for number, line in enumerate(new, number + 1)}
        if tags:
            self._log(tags=[RunTag(name, line) for name, line in tags.items()])
            self._tags |= tags

    def finish(self, document: RunDocument | None) -> None:
        import mlflow

        if not self._id or document is None or document.ended is None or document.end == LEFT:
            return
        try:
            status = "FINISHED" if document.end == DONE else "FAILED"
            self._client.set_terminated(self._id, status, round(document.ended * 1000))
        except mlflow.MlflowException as error:
            raise OSError(without_secrets(str(error))) from None

    def _log(self, **batch: Any) -> None:
        import mlflow

        try:
            self._client.log_batch(self._id, **batch)
        except mlflow.MlflowException as error:
            raise _error_of(error, "MLflow refuses the row") from None


def _experiment(client: Any) -> str:
    """Return the id of the experiment for a new run, chosen as MLflow's own functions do."""
    if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):  # mlflow.set_experiment sets it too
        return number
    if not (name := os.environ.get("MLFLOW_EXPERIMENT_NAME")):
        return "0"  # "Default"
    experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id if experiment else client.create_experiment(name))


def _facts(document: RunDocument) -> dict[str, str]:
    """Return the facts that become parameters. The packages are left out, because there are too many."""
    facts: dict[str, Any] = {
        "script": document.script,
        "arguments": " ".join(document.arguments),
        "folder": document.folder,
        "num_ranks": sum(map(len, document.hosts.values())),
        "strategy": document.strategy,
        "python": document.python,
        "commit": document.commit,
        "is_changed": document.is_changed,
        **{f"settings.{name}": value for name, value in document.settings.items()},
    }
    return {name: str(value) for name, value in facts.items()}


def _allowed(name: str) -> str:
    """Return a name that MLflow allows. It treats names as paths, which must be in their shortest form."""
    parts = [part for part in _REFUSED.sub("_", name).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_MOST_NAME].rstrip("/") or "_"


def _missing(error: ImportError) -> str:
    """Describe which module is missing, and what to install."""
    if error.name in ("alembic", "sqlalchemy"):
        return f"{error.name}, which is not installed; pip install 'mpitrain[mlflow]'"
    return f"the module {error.name}, which is not installed; install the package that has it"


def _error_of(error: Any, refusal: str) -> Exception:
    said = without_secrets(str(error))
    if error.error_code in _NO_ANSWER:
        return ConnectionError(f"MLflow does not answer: {said}")
    return ConfigError(f"{refusal}: {said}")
