"""A job that fails: its record has why, what the ranks printed last, and what the training had been told."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import Job, run_command
from mpitrain.dashboard.record_reader import run_id
from mpitrain.training.run_document import read_document
from mpitrain.training.writers.json_lines import read_events
from serving import dashboard

SCRIPT = r"""
import os, pathlib, signal, sys, time
import numpy
import mpitrain as mt

folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]

def build(world):
    def function(parameters, batch, on_gradient):
        time.sleep(0.01)
        on_gradient("w", parameters["w"] - batch[0].mean())
        return 0.5

    data = mt.data.ArrayData(world, [numpy.arange(10.0)], global_batch=5)
    return mt.Parts(mt.ArrayFunction(function, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(), data)

class Fault(mt.Hook):
    ends_run = True
    is_told = False

    def after_step(self, trainer, step):
        was_told, self.is_told = self.is_told, trainer.steering.rate_factor != 1.0
        if how == "told" and not was_told:  # one step later, so that rank 0 has noted the order
            return
        if how != "told" and step.number < 20 or trainer.world.rank != 1:
            return
        print("the last words of rank 1", flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("it is no number")

record = mt.Record([mt.writers.JsonLines(folder)], steps=1000000 if how == "told" else 5)
mt.Trainer(build, [mt.StopAtStep(1_000_000), Fault(), record]).run()
"""


def failed(folder: Path, how: str, during: Any = lambda _: None) -> Job:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "mpitrain", "run", "-n", "3", "--hosts", "localhost", str(script)]
    return run_command([*line, str(folder / "record"), how], timeout=200, during=during)


@pytest.mark.parametrize(
    ("how", "why"), [("killed", "rank 1 on {host} was killed by signal 9"), ("raised", "ValueError: it is no number")]
)
def test_whoever_fails_the_record_says_why(tmp_path: Path, how: str, why: str) -> None:
    job = failed(tmp_path, how)
    assert job.code != 0 and job.left == [], job.output
    document = read_document(tmp_path / "record/run.json")
    (host,) = document.hosts
    assert why.format(host=host) in document.end
    assert document.ended is not None and document.steps == 1_000_000
    kept = tmp_path / "record/output.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600, "what ranks print may have secrets"
    lines = [(line["ranks"], line["text"]) for line in json.loads(kept.read_text())["lines"]]
    assert ("1", "the last words of rank 1") in lines and len(lines) <= 200
    if how == "raised":
        assert any("Traceback" in text for _, text in lines)
    with dashboard(tmp_path / "cache", str(tmp_path / "record")) as served:
        path = f"/api/runs/{run_id(tmp_path / 'record')}"
        served.wait_for("/api/runs", served.records)
        run = served.get(path)["run"]
        assert run["state"] == "failed" and why.format(host=host) in run["why"]

        def output(query: str = "") -> Any:
            status, _, text = served.ask(f"{path}/output{query}", token=served.operator)
            assert status == 200
            return json.loads(text)

        assert [line["text"] for line in output("?ranks=0-1&text=WORDS%20OF")["lines"]] == ["the last words of rank 1"]
        assert output("?ranks=0,2&text=words%20of")["lines"] == []
        assert "names no ranks" in output("?ranks=x")["refused"]
        kept.write_text("[")
        assert "output.json" in output()["refused"]
        kept.unlink()
        assert "has gone with the launcher" in output()["refused"]


def test_an_order_is_in_the_record_when_it_is_applied(tmp_path: Path) -> None:
    """The run fails before its next row, because of the order."""

    def during(_: subprocess.Popen[str]) -> None:
        for _attempt in range(100):
            words = [sys.executable, "-m", "mpitrain", "ps", "--hosts", "localhost", "--json"]
            jobs = json.loads(subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout)
            ours = [one["job"] for one in jobs["jobs"] if str(tmp_path) in one["script"] and one["step"] > 2]
            if ours:
                break
        tell = [sys.executable, "-m", "mpitrain", "tell", "--hosts", "localhost", ours[0], "rate", "0.5"]
        subprocess.run(tell, capture_output=True, timeout=60, check=False)  # the job may end before it has answered

    job = failed(tmp_path, "told", during)
    assert job.code != 0 and job.left == [], job.output
    (event,) = read_events(tmp_path / "record/metrics.jsonl")
    assert event.text == "the learning rate is multiplied by 0.5, so by 0.5 in all"
    with dashboard(tmp_path / "cache", str(tmp_path / "record")) as served:
        served.wait_for("/api/runs", served.records)
        answer = served.get(f"/api/runs/{run_id(tmp_path / 'record')}")
        assert [one["text"] for one in answer["events"]] == [event.text]
        assert answer["run"]["event"] == event.text
