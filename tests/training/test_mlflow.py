"""The writer for MLflow, with its library, read back by its library: values, steps, parameters, a resume."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import HANG_SECONDS, REPOSITORY, run_command, run_job
from jobs import mpiexec as mpiexec_of
from mpitrain import RunEvent
from mpitrain.errors import ConfigError
from mpitrain.training.run_document import read_document
from mpitrain.training.writers import service
from mpitrain.training.writers.json_lines import read_rows
from mpitrain.writers import Mlflow

mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # those of the library are not ours
PROGRAM = REPOSITORY / "tests/training/recorded_at_service.py"
MOST = sys.float_info.max  # what the database has for infinity
LOST = RunEvent(3, "rank 2 on a was lost", "ranks", (2,), 2, 0.1)


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(service, "PATIENCE_SECONDS", HANG_SECONDS)  # a busy machine needs a while for a database


class Found:
    """The only run of a directory, as MLflow's client reads it."""

    def __init__(self, directory: Path, experiment: str = "0") -> None:
        self.client = mlflow.MlflowClient(f"sqlite:///{directory}/mlflow.db")
        (self.run,) = self.client.search_runs([experiment])
        self.tags = {name: value for name, value in self.run.data.tags.items() if not name.startswith("mlflow.")}

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in self.client.get_metric_history(self.run.info.run_id, name)]


def written(writer: Any, rows: list[dict[str, float]], after_step: int = 0, events: Any = ()) -> None:
    writer.open(after_step)
    for row in rows:
        writer.write(row, events)
        events = ()
    writer.close()


def test_values_come_back(tmp_path: Path) -> None:
    rows = [
        {"step": 2, "loss": 0.1 + 0.2, "big": 1e300, "a, b": 1.0, "a; b": 2.0},
        {"step": 4, "loss": math.inf, "tiny": 5e-324, "a; b": 3.0},
        {"step": 6, "loss": -math.inf, "a, b": math.nan},
    ]
    written(Mlflow(tmp_path / "first"), rows)
    found = Found(tmp_path / "first")
    assert found.run.info.run_name == "first"
    assert sorted(found.run.data.metrics) == ["a_ b", "a_ b 2", "big", "loss", "tiny"]
    assert found.points("loss") == [(2, 0.1 + 0.2), (4, MOST), (6, -MOST)]
    assert (found.points("big"), found.points("tiny")) == ([(2, 1e300)], [(4, 5e-324)])
    assert found.points("a_ b 2") == [(2, 2.0), (4, 3.0)]
    first, second = found.points("a_ b")
    assert (first, second[0], math.isnan(second[1])) == ((2, 1.0), 6, True)


def test_a_step_that_comes_twice_in_a_batch(tmp_path: Path) -> None:
    writer = Mlflow(tmp_path)
    writer.open(0)
    writer.write_all([({"step": step, "loss": loss}, ()) for step, loss in ((1, 1.0), (2, 2.0), (2, 3.0), (1, 4.0))])
    writer.close()
    assert Found(tmp_path).points("loss") == [(1, 1.0), (2, 2.0)]


def test_no_password_in_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)  # as if it were not installed
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg2://ada:SECRET@lab1/x")
    with pytest.raises(ConfigError, match=r"^MLflow at postgresql\+psycopg2://lab1/x needs the module psycopg2, "):
        Mlflow(tmp_path).open(0)


def test_more_values_than_a_request_takes(tmp_path: Path) -> None:
    row = {"step": 1, **{f"m{number}": number / 7 for number in range(2345)}}
    written(Mlflow(tmp_path), [row])
    assert Found(tmp_path).run.data.metrics == {name: value for name, value in row.items() if name != "step"}


def test_a_resume_goes_on_with_the_run(tmp_path: Path) -> None:
    """Steps that are made again stay as they were; events that come again too."""
    written(Mlflow(tmp_path, name="mine"), [{"step": step, "loss": float(step)} for step in (2, 4, 6)])
    again = [{"step": step, "loss": -1.0, "new": 1.0} for step in (4, 5, 6, 7)]
    for _ in range(2):
        written(Mlflow(tmp_path, name="other"), again, 3, [LOST])
    found = Found(tmp_path)
    assert found.run.info.run_name == "mine"
    assert found.points("loss") == [(2, 2.0), (4, 4.0), (6, 6.0), (7, -1.0)]
    assert found.points("new") == [(7, 1.0)]
    assert found.tags == {"event 1": LOST.line()}


def test_a_training_from_the_beginning_is_another_run(tmp_path: Path) -> None:
    for _ in range(2):
        written(Mlflow(tmp_path), [{"step": 1, "loss": 1.0}])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert [run.data.metrics for run in client.search_runs(["0"])] == [{"loss": 1.0}] * 2
    kept = json.loads((tmp_path / "mlflow.json").read_text())
    assert kept == {"run": client.search_runs(["0"], order_by=["attributes.start_time DESC"])[0].info.run_id}


def test_a_run_that_is_gone(tmp_path: Path) -> None:
    written(Mlflow(tmp_path), [{"step": 1, "loss": 1.0}])
    (tmp_path / "mlflow.json").write_text('{"run": "0123"}')
    with pytest.raises(ConfigError, match=r"refuses to continue with run 0123 of .*mlflow\.json: .*0123"):
        Mlflow(tmp_path).open(1)


def test_the_experiment_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    for part in range(2):
        written(Mlflow(tmp_path, name=str(part)), [{"step": 1, "loss": 1.0}])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("digits").experiment_id
    assert sorted(run.info.run_name for run in client.search_runs([experiment])) == ["0", "1"]
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "4711")
    with pytest.raises(ConfigError, match=r"MLflow at sqlite.* refuses: .*4711"):
        Mlflow(tmp_path / "other").open(0)


def trained(directory: Path, steps: int, ranks: int, *kill: str, **env: str) -> Any:
    command = [*mpiexec_of(ranks), sys.executable, str(PROGRAM), str(directory), str(steps), "Mlflow", *kill]
    return run_command(command, timeout=120, env=env)


def test_a_training_that_is_killed_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """A power cut after step 8; two ranks continue from step 5 instead of three."""
    killed = trained(tmp_path, 12, 3, "8")
    assert killed.code != 0
    first = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["step"] <= 8]
    job = trained(tmp_path, 12, 2)
    assert (job.code, job.left) == (0, []), job.output
    found, rows = Found(tmp_path), read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    rows = first + rows[len(first) :]
    assert len(rows) == 12
    for name in ("epoch", "samples", "seconds", "loss", "gradient_norm"):
        assert found.points(name) == [(row["step"], row[name]) for row in rows]
    odd = dict(found.points("_odd_ name"))
    assert [step for step, value in sorted(odd.items()) if math.isnan(value)] == [3, 6, 9, 12]
    assert {step: value for step, value in odd.items() if step % 3} == {
        step: MOST if step % 3 == 1 else -0.1 for step in range(1, 13) if step % 3
    }
    document, params = read_document(tmp_path / "run.json"), found.run.data.params
    assert {name: params[name] for name in ("num_ranks", "strategy", "python", "script", "commit")} == {
        "num_ranks": "3",
        "strategy": "Sync",
        "python": document.python,
        "script": str(PROGRAM),
        "commit": document.commit,
    }
    assert found.tags["num_ranks after step 5"] == "2"
    assert (found.tags["end"], found.tags["after_step"]) == ("done", "5")
    assert json.loads(found.tags["hosts"]) == document.hosts
    assert found.run.info.status == "FINISHED"
    assert found.run.info.end_time == round((document.ended or 0) * 1000)


OWN = """
import sys
import mlflow, numpy, torch
import mpitrain as mt
from mpitrain.training.writers import service

service.PATIENCE_SECONDS = 300.0  # for a busy machine

torch.manual_seed(0)

def build(world):
    x = torch.arange(12.0).reshape(12, 1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    data = mt.data.ArrayData(world, (x.numpy(), 2 * x.numpy()), global_batch=4)
    return mt.Parts(mt.TorchModule(model, loss, optimizer), mt.Sync(), data)

class Own(mt.Hook):
    def after_step(self, trainer, step):
        if trainer.world.is_root:
            mlflow.log_metric("own", step.number, step=step.number)

world = mt.init()
if world.is_root:
    mlflow.set_tracking_uri("sqlite:///" + sys.argv[1] + "/mlflow.db")
    mlflow.set_experiment("mine")
    mlflow.start_run(run_name="own")
record = mt.Record([mt.writers.Mlflow(sys.argv[1]), mt.writers.JsonLines(sys.argv[1])], steps=1)
mt.Trainer(build, [mt.StopAtStep(4), Own(), record]).run()
if world.is_root:
    assert mlflow.active_run().info.run_name == "own"
    mlflow.end_run()
"""


def test_beside_a_run_of_the_script_itself(tmp_path: Path) -> None:
    """A script of PyTorch that uses MLflow as its documents say: both runs are in the script's experiment."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    job = run_job(2, OWN, str(tmp_path), timeout=120)
    assert (job.code, job.left) == (0, []), job.output
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = {run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("mine").experiment_id])}
    assert sorted(runs) == sorted(["own", tmp_path.name])
    assert runs["own"].data.metrics == {"own": 4.0}
    found = [one.value for one in client.get_metric_history(runs[tmp_path.name].info.run_id, "loss")]
    assert found == [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert "own" not in runs[tmp_path.name].data.metrics
