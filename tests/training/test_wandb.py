"""The writer for Weights & Biases, offline, with its library; read back with the messages of its library."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import REPOSITORY, Job, mpiexec, run_command, run_job
from mpitrain import RunEvent
from mpitrain.training.run_document import read_document
from mpitrain.training.writers.json_lines import read_rows

pytest.importorskip("wandb", reason="wandb is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # those of the library are not ours
PROGRAM = REPOSITORY / "tests/training/recorded_at_service.py"
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
_BLOCK = 32768
_WHOLE, _LAST = 1, 4  # kinds of a part of a message


def messages(path: Path) -> Iterator[Any]:
    """The messages in a file of the library, which is a log of LevelDB behind 7 bytes; to its whole end."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if _BLOCK - at % _BLOCK < 7:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(message)
            message = b""


class Found:
    """All that the folders of a record's run have, in the order in which `wandb sync` would send them."""

    def __init__(self, directory: Path) -> None:
        self.rows: list[dict[str, float]] = []
        self.config: dict[str, Any] = {}
        self.ids: list[str] = []
        self.names: set[str] = set()
        self.notes = ""
        self.codes: list[int] = []
        for path in sorted(
            (directory / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns
        ):
            self.ids.append(path.stem.removeprefix("run-"))
            for message in messages(path):
                if message.HasField("history"):
                    row = {
                        item.key or item.nested_key[0]: float(json.loads(item.value_json))
                        for item in message.history.item
                    }
                    assert row["_step"] == message.history.step.num
                    self.rows.append(row)
                elif message.HasField("run"):
                    self.names.add(message.run.display_name)
                    self.notes = message.run.notes or self.notes
                    self._configure(message.run.config)
                elif message.HasField("config"):
                    self._configure(message.config)
                elif message.HasField("exit"):
                    self.codes.append(message.exit.exit_code)

    def _configure(self, config: Any) -> None:
        for item in config.update:
            if item.nested_key:
                raise AssertionError(f"a nested key: {item}")
            self.config[item.key] = json.loads(item.value_json)

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(int(row["_step"]), row[name]) for row in self.rows if name in row]


WRITTEN = """
import json, sys
import mpitrain as mt
from mpitrain.training.writers import service

service.PATIENCE_SECONDS = 300.0  # for a busy machine
writer = mt.writers.Wandb(sys.argv[1], name=sys.argv[4])
writer.open(int(sys.argv[2]))
events = [mt.RunEvent.from_plain(fields) for fields in json.loads(sys.argv[5])]
for row in json.loads(sys.argv[3]):
    writer.write(row, events)
    events = []
writer.close()
"""


def written(
    directory: Path, rows: list[dict[str, float]], after_step: int = 0, name: str = "", *events: RunEvent
) -> None:
    plain = json.dumps([event.plain() for event in events])
    job = run_job(None, WRITTEN, str(directory), str(after_step), json.dumps(rows), name, plain, env=OFFLINE)
    assert (job.code, job.left) == (0, []), job.output


def test_values_come_back(tmp_path: Path) -> None:
    rows = [
        {"step": 2, "loss": 0.1 + 0.2, "big": 1e300, "a, b": 1.0, "_a, b": 2.0, "__": 3.0},
        {"step": 4, "loss": math.inf, "tiny": 5e-324},
        {"step": 6, "loss": -math.inf, "a, b": math.nan, "minus": -0.0},
    ]
    written(tmp_path / "first", rows)
    found = Found(tmp_path / "first")
    assert found.names == {"first"}
    assert found.points("loss") == [(2, 0.1 + 0.2), (4, math.inf), (6, -math.inf)]
    assert (found.points("big"), found.points("tiny")) == ([(2, 1e300)], [(4, 5e-324)])
    assert (found.points("a, b 2"), found.points("metric")) == ([(2, 2.0)], [(2, 3.0)])
    first, second = found.points("a, b")
    assert (first, second[0], math.isnan(second[1])) == ((2, 1.0), 6, True)
    ((step, minus),) = found.points("minus")
    assert (step, minus) == (6, 0.0)
    names = {name for row in found.rows for name in row if not name.startswith("_")}
    assert names == {"loss", "big", "tiny", "a, b", "a, b 2", "metric", "minus"}


def test_a_resume_goes_on_with_the_run(tmp_path: Path) -> None:
    """Steps that are made again stay as they were; events that come again too."""
    lost = RunEvent(3, "rank 2 on a was lost", "ranks", (2,), 2, 0.1)
    told = RunEvent(4, "the run ends, and is saved", "told", (), 2, 0.0, teller="ada on a", at=1.0)
    written(tmp_path, [{"step": step, "loss": float(step)} for step in (2, 4, 6)])
    again = [{"step": step, "loss": -1.0, "new": 1.0} for step in (4, 5, 6, 7)]
    written(tmp_path, again, 3, "", lost)
    written(tmp_path, again, 3, "", lost, told)
    found = Found(tmp_path)
    assert found.points("loss") == [(2, 2.0), (4, 4.0), (6, 6.0), (7, -1.0)]
    assert found.points("new") == [(7, 1.0)]
    assert found.notes == f"{lost.line()}\n{told.line()}"
    assert len(found.ids) == 3
    assert set(found.ids) == {json.loads((tmp_path / "wandb.json").read_text())["run"]}


def test_a_training_from_the_beginning_is_another_run(tmp_path: Path) -> None:
    for _ in range(2):
        written(tmp_path, [{"step": 1, "loss": 1.0}], 0, "mine")
    found = Found(tmp_path)
    assert len(set(found.ids)) == 2
    assert found.points("loss") == [(1, 1.0)] * 2
    assert found.names == {"mine"}


def trained(directory: Path, steps: int, ranks: int, *kill: str) -> Job:
    command = [*mpiexec(ranks), sys.executable, str(PROGRAM), str(directory), str(steps), "Wandb", *kill]
    return run_command(command, timeout=120, env=OFFLINE)


def test_a_training_that_fails_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """An error after step 8; two ranks continue from step 5 instead of three."""
    failed = trained(tmp_path, 12, 3, "-8")
    assert (failed.code != 0, failed.left) == (True, []), failed.output
    assert "on purpose" in failed.stderr
    first = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["step"] <= 8]
    job = trained(tmp_path, 12, 2)
    assert (job.code, job.left) == (0, []), job.output
    found, rows = Found(tmp_path), read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    rows = first + rows[len(first) :]
    for name in ("epoch", "samples", "seconds", "loss", "gradient_norm"):
        assert found.points(name) == [(row["step"], row[name]) for row in rows]
    odd = dict(found.points("odd, name"))
    assert [step for step, value in sorted(odd.items()) if math.isnan(value)] == [3, 6, 9, 12]
    assert {step: value for step, value in odd.items() if step % 3} == {
        step: math.inf if step % 3 == 1 else -0.1 for step in range(1, 13) if step % 3
    }
    assert len(found.ids) == 2
    assert len(set(found.ids)) == 1
    document = dataclasses.asdict(read_document(tmp_path / "run.json"))
    document["first_started"] = found.config["first_started"]  # only run.json keeps that of the first process
    assert {name: found.config[name] for name in document} == document
    assert found.codes == [1, 0]


OWN = """
import sys
import numpy, torch, wandb
import mpitrain as mt
from mpitrain.training.writers import service

service.PATIENCE_SECONDS = 300.0  # for a busy machine
torch.manual_seed(0)

def build(world):
    x = torch.arange(12.0).reshape(12, 1)
    model = torch.nn.Linear(1, 1)
    if world.is_root:
        wandb.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    data = mt.data.ArrayData(world, (x.numpy(), 2 * x.numpy()), global_batch=4)
    return mt.Parts(mt.TorchModule(model, loss, optimizer), mt.Sync(), data)

class Own(mt.Hook):
    def after_step(self, trainer, step):
        if trainer.world.is_root:
            wandb.log({"own": step.number})

world = mt.init()
if world.is_root:
    wandb.init(project="mine", name="own", dir=sys.argv[2])
record = mt.Record([mt.writers.Wandb(sys.argv[1]), mt.writers.JsonLines(sys.argv[1])], steps=1)
mt.Trainer(build, [mt.StopAtStep(4), Own(), record]).run()
if world.is_root:
    assert wandb.run.name == "own"
    wandb.finish()
"""


def test_beside_a_run_of_the_script_itself(tmp_path: Path) -> None:
    """A script of PyTorch that uses wandb as its documents say: neither run has the metrics of the other."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    record, own = tmp_path / "record", tmp_path / "own"
    own.mkdir()
    job = run_job(2, OWN, str(record), str(own), timeout=120, env=OFFLINE)
    assert (job.code, job.left) == (0, []), job.output
    found = Found(record)
    assert found.points("loss") == [(int(row["step"]), row["loss"]) for row in read_rows(record / "metrics.jsonl")]
    assert found.points("own") == []
    assert [value for _, value in Found(own).points("own")] == [1.0, 2.0, 3.0, 4.0]
    assert Found(own).points("loss") == []
